"""Write a checkpoint with its adapters (LoRA) merged into the weights: a plain one that computes the same function.

    python tools/ckpts/merge_lora.py --input_dir IN --output_dir OUT

IN is a save folder (its `latest` is taken) or one global_step<N> folder of a run with `lora`, at any parallel sizes,
which OUT keeps. The sums are made in fp32 and rounded once to the weights' own type. OUT's configs/ have lora: null.
The optimizer's state, which is the adapters', is left out: go on with no_load_optim or finetune.
"""

import argparse
import os
import sys
from typing import Optional, Sequence

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: no GPU is needed or used
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from megatron.checkpointing.config_texts import with_settings  # noqa: E402
from megatron.checkpointing.merge import MergedReader  # noqa: E402
from megatron.checkpointing.model_settings import checkpoint_folder, config_paths, inference_args  # noqa: E402
from megatron.checkpointing.reader import CheckpointReader  # noqa: E402
from megatron.checkpointing.reshard import write_resharded  # noqa: E402
from megatron.checkpointing.stamp import check_stamp  # noqa: E402
from megatron.errors import NeoXError  # noqa: E402
from megatron.neox_arguments.loading import load_files  # noqa: E402
from tools.options import checkpoint_options  # noqa: E402


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse(arguments)
    try:
        print(f"wrote {merge(options)}")
    except (NeoXError, OSError) as error:
        print(f"merge_lora: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_dir", "--input-dir", required=True, metavar="IN")
    parser.add_argument("--output_dir", "--output-dir", required=True, metavar="OUT", help="new or empty folder")
    checkpoint_options(parser)
    return parser.parse_args(arguments)


def merge(options: argparse.Namespace) -> str:
    """Write the new checkpoint; returns its folder. Raises CheckpointError, ConfigError."""
    reader = CheckpointReader(checkpoint_folder(options.input_dir, options.iteration))
    _, texts = load_files(options.config_file or config_paths(reader.folder))
    neox_args = inference_args(reader, options.config_file)
    check_stamp(neox_args, reader.folder)
    weights = MergedReader(reader, neox_args)
    texts = with_settings(texts, {"lora": None}, "merged.yml")
    plain = neox_args.update(lora=None)
    return write_resharded(weights, plain, options.output_dir, reader.pipe_parallel_size, texts)


if __name__ == "__main__":
    sys.exit(main())
