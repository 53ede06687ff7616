"""Make a Hugging Face model folder of a checkpoint, of ours or of GPT-NeoX's.

    python tools/ckpts/convert_neox_to_hf.py --input_dir CHECKPOINT --output_dir OUT [--config_file YML ...]

CHECKPOINT is a save folder (its `latest` is taken) or one global_step<N> folder, at any tensor-parallel size, with
layer files or without. The configs kept in it are used unless --config_file names others. OUT gets safetensors files,
config.json, generation_config.json and the tokenizer. The architecture is chosen by what can hold the model.
"""

import argparse
import json
import os
import sys
from typing import Optional, Sequence

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: no GPU is needed or used
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a tokenizer that is not on this machine is not waited for
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron.convert.exporting import Plan, plan_export, write_export  # noqa: E402
from megatron.convert.hf_writer import MAX_SHARD_BYTES  # noqa: E402
from megatron.convert.outputs import check_new  # noqa: E402
from megatron.convert.precision import OPTIONS  # noqa: E402
from megatron.errors import NeoXError  # noqa: E402
from tools.ending import sigterm_as_exit  # noqa: E402
from tools.options import at_least  # noqa: E402


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse(arguments)
    try:
        with sigterm_as_exit():
            convert(options)
    except (NeoXError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_dir", "--input-dir", required=True, metavar="CHECKPOINT")
    parser.add_argument(
        "--config_file", "--config-file", nargs="+", default=(), metavar="YML", help="by default those in CHECKPOINT"
    )
    parser.add_argument("--output_dir", "--output-dir", required=True, metavar="OUT", help="new or empty folder")
    parser.add_argument(
        "--precision", choices=OPTIONS, default="auto", help="of the weights written; auto: as they are"
    )
    parser.add_argument(
        "--architecture",
        default="auto",
        metavar="NAME",
        help="neox, llama, mistral or another model_type; auto (default): the one it was imported from, else the first "
        "that can hold the model",
    )
    _add_vocabulary(parser)
    parser.add_argument("--iteration", type=at_least(0), help="by default the one `latest` names")
    parser.add_argument(
        "--max-shard-bytes", type=at_least(1), default=MAX_SHARD_BYTES, metavar="N", help="size of a file (5 GB)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the table of tensors and the config, and stop")
    return parser.parse_args(arguments)


def _add_vocabulary(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no_save_tokenizer", "--no-save-tokenizer", action="store_true")
    parser.add_argument(
        "--vocab-is-hf-tokenizer",
        action="store_true",
        help="vocab_file lies in the folder of a Hugging Face tokenizer, whose files are taken (found out by itself)",
    )
    parser.add_argument("--pad-token-id", type=int, default=-1, metavar="ID", help="in config.json and the tokenizer")
    parser.add_argument(
        "--vocab-size",
        type=at_least(1),
        metavar="N",
        help="rows of the tables written; by default those of the model imported once, or the tokenizer's tokens",
    )


def convert(options: argparse.Namespace) -> None:
    """Raises ConversionError, CheckpointError or ConfigError."""
    padding = None if options.pad_token_id < 0 else options.pad_token_id
    if not options.dry_run:
        check_new(os.path.abspath(options.output_dir))
    plan = plan_export(
        options.input_dir,
        config_files=options.config_file,
        architecture=options.architecture,
        precision=options.precision,
        vocab_size=options.vocab_size,
        pad_token_id=padding,
        iteration=options.iteration,
        hf_tokenizer=options.vocab_is_hf_tokenizer,
    )
    for note in plan.notes:
        print(note)
    if options.dry_run:
        show(plan)
        return
    print(f"{options.input_dir}: written as a {plan.family.architecture}")
    saved = not options.no_save_tokenizer
    write_export(plan, options.output_dir, options.max_shard_bytes, padding, saved, say=print)
    print(f"wrote {options.output_dir}")


def show(plan: Plan) -> None:
    """The table of tensors and the config."""
    table = Table("tensor", "shape", "dtype", "made of", title=plan.family.architecture)
    for line in plan.lines:
        dtype = str(plan.dtypes[line]).removeprefix("torch.")
        for name, shape in zip(line.theirs, line.shapes, strict=True):
            table.add_row(name, " x ".join(map(str, shape)), dtype, f"layer {line.index} {line.ours}")
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(json.dumps(plan.config, indent=2))


if __name__ == "__main__":
    sys.exit(main())
