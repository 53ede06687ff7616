"""Write the adapters (LoRA) of a checkpoint as a folder for Hugging Face's PEFT.

    python tools/ckpts/export_lora.py --input_dir CHECKPOINT --output_dir OUT [--base_model DIR_OR_NAME]

CHECKPOINT is a save folder (its `latest` is taken) or one global_step<N> folder of a run with `lora`. OUT gets
adapter_config.json and adapter_model.safetensors, which

    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), OUT)

puts on BASE: the Hugging Face model that the run's base was imported from, or an export of that base with
tools/ckpts/convert_neox_to_hf.py, with the same --architecture. The functions are equal.
"""

import argparse
import os
import sys
from typing import Optional, Sequence

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: no GPU is needed or used
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from megatron.convert.peft import export_peft  # noqa: E402
from megatron.errors import NeoXError  # noqa: E402
from tools.options import checkpoint_options  # noqa: E402


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse(arguments)
    try:
        export_peft(
            options.input_dir,
            options.output_dir,
            config_files=options.config_file,
            architecture=options.architecture,
            iteration=options.iteration,
            base_model=options.base_model,
            say=print,
        )
    except (NeoXError, OSError) as error:
        print(f"export_lora: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output_dir}")
    return 0


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_dir", "--input-dir", required=True, metavar="CHECKPOINT")
    parser.add_argument("--output_dir", "--output-dir", required=True, metavar="OUT", help="new or empty folder")
    parser.add_argument("--base_model", "--base-model", default="", metavar="NAME", help="for adapter_config.json")
    parser.add_argument("--architecture", default="auto", metavar="NAME", help="as for convert_neox_to_hf.py")
    checkpoint_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
