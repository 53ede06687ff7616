"""Put the LoRA adapter of a folder of Hugging Face's PEFT on a checkpoint of the model that it was trained on.

    python tools/ckpts/import_lora.py --input_dir CHECKPOINT --adapter DIR --output_dir OUT

CHECKPOINT is a save folder (its `latest` is taken) or one global_step<N> folder without adapters, at any parallel
sizes, which OUT keeps; DIR has adapter_config.json and adapter_model.safetensors. OUT's configs/ have `lora` as it
follows from them. Modules that the adapter leaves out (often k_proj) add nothing and can be trained on.
"""

import argparse
import os
import sys
from typing import Optional, Sequence

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: no GPU is needed or used
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from megatron.convert.peft_import import import_peft  # noqa: E402
from megatron.errors import NeoXError  # noqa: E402
from tools.options import checkpoint_options  # noqa: E402


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse(arguments)
    try:
        folder = import_peft(
            options.input_dir,
            options.adapter,
            options.output_dir,
            config_files=options.config_file,
            architecture=options.architecture,
            iteration=options.iteration,
        )
    except (NeoXError, OSError) as error:
        print(f"import_lora: {error}", file=sys.stderr)
        return 1
    print(f"wrote {folder}")
    return 0


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_dir", "--input-dir", required=True, metavar="CHECKPOINT")
    parser.add_argument("--adapter", required=True, metavar="DIR", help="PEFT's folder")
    parser.add_argument("--output_dir", "--output-dir", required=True, metavar="OUT", help="new or empty folder")
    parser.add_argument("--architecture", default="auto", metavar="NAME", help="as for convert_neox_to_hf.py")
    checkpoint_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
