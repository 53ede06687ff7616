"""What a config costs, whether it fits, and what each attention backend does with its head_dim.

    python -m tools.head_dim plan CONFIG.yml [MORE.yml ...] [--device h100 --gpus 8 --tp 2 --zero 1]
    python -m tools.head_dim plan CONFIG.yml --sweep head_dim=64,96,128,256 --at-equal params --plot widths.png

Nothing is built and no GPU is needed: every number is a formula of megatron.costs, which the tests hold against built
models. Exit status 1 if --device is given and the model does not fit, else 0.
"""

import argparse
import json
import os
import sys
from typing import Any, Dict, Optional

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from tools.head_dim import configs
from tools.head_dim.devices import DEVICES
from tools.options import at_least

MFU = 0.4
"""The share of a device's peak that large training runs are glad of; a stated assumption, not a measurement."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    number = at_least(1)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="YAML files, merged as for training")
    parser.add_argument("--seq", type=number, metavar="S", help="seq_length")
    parser.add_argument("--batch", type=number, default=1, metavar="B", help="texts in the KV cache (1)")
    parser.add_argument("--micro-batch", type=number, metavar="B", help="train_micro_batch_size_per_gpu")
    parser.add_argument("--gpus", type=number, metavar="N", help="devices in all")
    parser.add_argument("--tp", type=number, metavar="N", help="model_parallel_size")
    parser.add_argument("--pp", type=at_least(0), metavar="N", help="pipe_parallel_size")
    parser.add_argument("--zero", type=int, choices=range(4), help="ZeRO stage")
    parser.add_argument("--device", type=str.lower, choices=DEVICES, help="does it fit, and how fast could it be?")
    parser.add_argument("--mfu", type=float, default=MFU, help=f"share of the device's peak that is reached ({MFU})")
    parser.add_argument("--vocab-size", type=number, metavar="V", help="rows of the embedding, where no tokenizer says")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sweep", metavar="KEY=V1,V2,...", help="compare these values of a setting")
    parser.add_argument("--at-equal", choices=("params", "flops"), help="make the variants of --sweep cost the same")
    parser.add_argument(
        "--adjust", choices=("ffn", "heads"), default="ffn", help="by the MLP's width (ffn) or the number of heads"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the variants of --sweep")


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 1 if the model does not fit on --device."""
    if not 0 < options.mfu <= 1:
        raise ConfigError(f"--mfu {options.mfu}: it is a share of the peak, more than 0 and at most 1")
    if not options.sweep and (options.at_equal or options.plot):
        raise ConfigError("--at-equal and --plot are about the variants of --sweep: give that too")
    args = load(options)
    if options.sweep:
        from tools.head_dim import compare

        return compare.run(args, options)
    from tools.head_dim.report import report_on, tables

    report = report_on(args, options)
    if options.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        tables(report)
    return 1 if report["memory"].get("fits") is False else 0


def load(options: argparse.Namespace) -> NeoXArgs:
    """The arguments that the options make of the files. Raises ConfigError with every problem."""
    changes: Dict[str, Any] = {
        "seq_length": options.seq,
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "global_num_gpus": options.gpus,
        "model_parallel_size": options.tp,
        "pipe_parallel_size": options.pp,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    values = configs.values_of(options.configs)
    if options.micro_batch is not None:  # the batch is what it then comes to
        changes["train_batch_size"] = None
    if options.zero is not None:
        changes["zero_optimization"] = {**(values.get("zero_optimization") or {}), "stage": options.zero}
    if options.seq is not None:
        changes["max_position_embeddings"] = max(options.seq, values.get("max_position_embeddings") or 0)
    if options.gpus is None:
        needed = (options.tp or values.get("model_parallel_size") or 1) * max(
            options.pp if options.pp is not None else values.get("pipe_parallel_size") or 0, 1
        )
        changes["global_num_gpus"] = values.get("global_num_gpus") or needed
    args = configs.load(options.configs, **changes)
    rows = _vocabulary(args, options.vocab_size)
    return args.update(padded_vocab_size=rows) if rows is not None else args


def _vocabulary(args: NeoXArgs, asked: Optional[int]) -> Optional[int]:
    """Rows of the embedding, None if the config gives them.

    Raises ConfigError if nothing does, DataError for a tokenizer that cannot be read.
    """
    from megatron.geometry import padded_vocab_size

    if asked is not None:
        return padded_vocab_size(asked, args.make_vocab_size_divisible_by, args.model_parallel_size)
    if args.padded_vocab_size is not None:
        return None
    if args.vocab_file and os.path.exists(args.vocab_file):
        args.build_tokenizer()
        return args.padded_vocab_size
    raise ConfigError("the size of the vocabulary is not known: give --vocab-size, vocab_file or padded_vocab_size")
