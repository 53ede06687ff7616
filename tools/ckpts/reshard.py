"""Write a checkpoint's weights for another tensor-parallel and pipeline size.

    python tools/ckpts/reshard.py IN OUT --model-parallel-size N --pipe-parallel-size P

IN is a save folder (its `latest` is taken) or one global_step<N> folder. OUT gets global_step<N>/ and `latest`. The
function stays the same; the optimizer's state is left out, so the result is for inference and fine-tuning
(no_load_optim or finetune).
"""

import argparse
import os
import sys
from types import SimpleNamespace
from typing import Any, Mapping, Optional, Sequence

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: no GPU is needed or used
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a tokenizer that is not on this machine is not waited for
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from megatron.checkpointing.model_settings import checkpoint_folder, config_paths, inference_args  # noqa: E402
from megatron.checkpointing.reader import CheckpointReader  # noqa: E402
from megatron.checkpointing.reshard import write_resharded  # noqa: E402
from megatron.checkpointing.resharded import ReshardedReader  # noqa: E402
from megatron.checkpointing.shards import VOCABULARY, Shards  # noqa: E402
from megatron.checkpointing.stamp import check_stamp  # noqa: E402
from megatron.checkpointing.vocabulary import rows_at  # noqa: E402
from megatron.errors import ConfigError, NeoXError  # noqa: E402
from megatron.neox_arguments.fields import defaults  # noqa: E402
from megatron.neox_arguments.loading import load_files  # noqa: E402
from megatron.tokenizer import build_tokenizer  # noqa: E402
from tools.options import at_least  # noqa: E402


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse(arguments)
    try:
        folder = reshard(options)
    except (NeoXError, OSError) as error:
        print(f"reshard: {error}", file=sys.stderr)
        return 1
    print(f"wrote {folder}")
    return 0


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN", help="save folder, or a global_step<N> folder in it")
    parser.add_argument("out", metavar="OUT", help="new or empty folder")
    parser.add_argument("--model-parallel-size", type=at_least(1), required=True, metavar="N")
    parser.add_argument(
        "--pipe-parallel-size",
        type=at_least(0),
        required=True,
        metavar="P",
        help="0: one file per rank; 1 or more: one file per layer and rank",
    )
    parser.add_argument("--config", nargs="+", default=(), metavar="YML", help="by default those kept in IN")
    parser.add_argument("--iteration", type=at_least(0), help="by default the one `latest` names")
    parser.add_argument("--vocab-size", type=at_least(1), help="tokens in use, by default the tokenizer's")
    parser.add_argument(
        "--average-replicas",
        action="store_true",
        help="average weights that should be equal on all ranks and are not, instead of stopping",
    )
    return parser.parse_args(arguments)


def reshard(options: argparse.Namespace) -> str:
    """Write the new checkpoint and return its folder. Raises CheckpointError or ConfigError."""
    reader = CheckpointReader(checkpoint_folder(options.source, options.iteration))
    values, texts = load_files(options.config or config_paths(reader.folder))
    neox_args = inference_args(reader, options.config, reader.model_parallel_size)
    check_stamp(neox_args, reader.folder)
    _check_widths(neox_args, options.model_parallel_size)
    vocab_size = options.vocab_size or _vocab_size(values, reader, options.model_parallel_size)
    shards = Shards(neox_args, average=options.average_replicas)
    rows = _rows(reader, shards, neox_args, options.model_parallel_size, vocab_size)
    weights = ReshardedReader(reader, shards, options.model_parallel_size, rows, vocab_size)
    _describe(reader, options, rows)
    return write_resharded(weights, neox_args, options.out, options.pipe_parallel_size, texts)


def _check_widths(neox_args: Any, ranks: int) -> None:
    problems = [
        problem
        for number in range(neox_args.num_layers)
        for geometry in (neox_args.head_geometry(number), neox_args.mlp_geometry(number))
        for problem in geometry.shard_problems(ranks)
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _vocab_size(values: Mapping[str, Any], reader: CheckpointReader, ranks: int) -> Optional[int]:
    """The tokens in use by the config's tokenizer; None if it is not on this machine, or is not needed."""
    if ranks >= reader.model_parallel_size:
        return None  # more padding, if any: nothing can be lost
    try:
        return build_tokenizer(SimpleNamespace(**{**defaults(), **values})).vocab_size
    except NeoXError:
        return None


def _rows(reader: CheckpointReader, shards: Shards, neox_args: Any, ranks: int, vocab_size: Optional[int]) -> int:
    """The padded vocabulary at the new size."""
    if ranks == reader.model_parallel_size:
        return neox_args.padded_vocab_size
    tables = [
        shards.join(index, name, [reader.layer_state(index, rank)[name] for rank in range(reader.model_parallel_size)])
        for index in (0, reader.layer_indices()[-1])
        for name in reader.layer_state(index)
        if VOCABULARY.fullmatch(name)
    ]
    divisible_by = neox_args.make_vocab_size_divisible_by
    return rows_at(tables, divisible_by, reader.model_parallel_size, ranks, vocab_size)


def _describe(reader: CheckpointReader, options: argparse.Namespace, rows: int) -> None:
    form = "one file per layer and rank" if options.pipe_parallel_size else "one file per rank"
    print(
        f"{reader.folder}: model_parallel_size {reader.model_parallel_size} -> {options.model_parallel_size}, "
        f"{form}, vocabulary padded to {rows}; the optimizer's state is left out"
    )


if __name__ == "__main__":
    sys.exit(main())
