"""Make a checkpoint in GPT-NeoX's format of a Hugging Face model.

    python tools/ckpts/convert_hf_to_neox.py --input_dir MODEL --output_dir OUT [--tp N] [--pp P]

MODEL is a folder with config.json and weights (safetensors or .bin); --hf-model takes a name on the Hugging Face hub as
well, which is downloaded unless it is in the cache. OUT gets global_step0/ with `latest`, model.yml (a config that
loads it as it is) and huggingface/ (the tokenizer and the original config).
"""

import argparse
import os
import sys
from typing import Optional, Sequence

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: no GPU is needed or used
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from megatron.convert.hub import local_folder  # noqa: E402
from megatron.convert.importing import CONFIG_NAME, import_hf  # noqa: E402
from megatron.convert.precision import OPTIONS  # noqa: E402
from megatron.errors import NeoXError  # noqa: E402
from tools.ending import sigterm_as_exit  # noqa: E402
from tools.options import at_least  # noqa: E402


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse(arguments)
    return run(
        options.model,
        options.output_dir,
        model_parallel_size=options.tp,
        pipe_parallel_size=options.pp,
        precision=options.precision,
        make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
        iteration=options.iteration,
    )


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input_dir", "--input-dir", dest="model", metavar="DIR", help="a model folder")
    source.add_argument("--hf-model", "--hf_model", dest="model", metavar="NAME", help="a model folder, or a hub name")
    parser.add_argument("--output_dir", "--output-dir", required=True, metavar="OUT", help="new or empty folder")
    add_layout(parser)
    parser.add_argument(
        "--precision", choices=OPTIONS, default="auto", help="of the weights written; auto: as they are"
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=at_least(1),
        default=128,
        metavar="N",
        help="the embedding's rows are padded to a multiple of N x tp (128, as GPT-NeoX)",
    )
    parser.add_argument("--iteration", type=at_least(0), default=0, help="the N of global_step<N> (0)")
    return parser.parse_args(arguments)


def add_layout(parser: argparse.ArgumentParser) -> None:
    """--tp and --pp."""
    parser.add_argument("--tp", type=at_least(1), default=1, metavar="N", help="model_parallel_size (1)")
    parser.add_argument(
        "--pp",
        type=at_least(0),
        default=0,
        metavar="P",
        help="pipe_parallel_size; 0 (default): one file per rank; 1 or more: one file per layer and rank",
    )


def run(model: str, out: str, **options) -> int:
    """Import, and say what was made and what to do with it; returns the exit status."""
    try:
        with sigterm_as_exit():
            folder = import_hf(local_folder(model), out, say=print, **options)
    except (NeoXError, OSError) as error:
        print(f"import: {error}", file=sys.stderr)
        return 1
    print(f"wrote {folder} and its config {os.path.join(out, CONFIG_NAME)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
