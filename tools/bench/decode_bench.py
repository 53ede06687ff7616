"""Generating text beside transformers' generate, on the same weights, and beside the time of reading the weights.

    python -m tools.bench.decode_bench [--precision P ...] [--batch N ...] [--new-tokens N] [--repeats N] [--out DIR]

Greedy, a prompt of 64 random tokens and 128 more, with a cache, through `stream_tokens` as generate.py calls it. Ours
and transformers' are a process each, which take turns. Times are those of the tokens after the first; the prompt's own
time is a column of its own.

The limit is the time in which the weights (without the embedding) and the cache of a token's mean length can be read.
The rate is that of a copy, which reads every byte and writes it: both are counted.
"""

import statistics
import sys
from contextlib import ExitStack
from typing import Dict, List, Optional, Sequence

import torch

from tools.bench import report
from tools.bench.decode_workers import CACHES, COMPILED, EAGER, PEER
from tools.bench.shapes import settings
from tools.bench.workers import Figures, Worker, interleaved, median, median_ratio

TARGETS = {
    "copy": "tools.bench.limits:copy_bandwidth",
    "ours": "tools.bench.decode_workers:ours",
    "peer": "tools.bench.decode_workers:transformers",
}
WANTED = {"bfloat16": {EAGER: 1.7, COMPILED: 2.5}, "fp32": {EAGER: 1.5, COMPILED: 1.5}}
"""Tokens/s x transformers' at least."""
OF_LIMIT, OF_FORWARD = 0.55, 1.05
"""Compiled bfloat16, at least; the time of a prompt / that of the model's forward pass, at most."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__, "decode")
    parser.add_argument("--precision", nargs="+", choices=WANTED, default=list(WANTED))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    given = settings(precisions=options.precision, batches=options.batch, new_tokens=options.new_tokens)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(target, given)) for name, target in TARGETS.items()}
        measured = interleaved(workers, options.repeats)
    rows, targets = [], []
    for group in (f"{precision}, batch {batch}" for precision in options.precision for batch in options.batch):
        found = table(group, measured)
        rows += found.values()
        targets += wanted(group, found)
    picture = report.bars("of the limit", "time of reading weights and cache / time of a token", limit=1.0)
    report.report(options.out, "decode", "generation, 65 M Qwen3, greedy", rows, targets=targets, picture=picture)
    return 0


def table(group: str, measured: Dict[str, List[Figures]]) -> Dict[str, report.Row]:
    """The lines of one precision and batch size, by their names."""
    rates = [2 * each["bytes_per_second"] for each in measured["copy"]]
    peer = [each[f"{group}: {PEER}"] for each in measured["peer"]]
    lines = {PEER: peer}
    for name in (EAGER, COMPILED, *CACHES):
        if f"{group}: {name}" in measured["ours"][0]:
            lines[name] = [each[f"{group}: {name}"] for each in measured["ours"]]
    return {name: _row(f"{group}: {name}", figures, peer, rates) for name, figures in lines.items()}


def _row(line: str, figures: List[Figures], peer: List[Figures], rates: List[float]) -> report.Row:
    seconds, tokens = median(figures), torch.tensor(figures[-1]["tokens"])
    row = {
        "line": line,
        "ms/token": 1000 * seconds,
        "tokens/s": len(tokens) / seconds,
        "x transformers": median_ratio(peer, figures),
        "of the limit": statistics.median(
            each["bytes"] / rate / each["seconds"] for each, rate in zip(figures, rates, strict=True)
        ),
        "prompt, ms": 1000 * median(figures, "prompt"),
        "cache, MiB": figures[0]["cache"] / 2**20,
        # In half precision one choice between two equals changes all that follow.
        "same tokens": (tokens == torch.tensor(peer[-1]["tokens"])).float().mean().item(),
    }
    if "forward" in figures[0]:
        row["prompt / forward"] = statistics.median(each["prefill"] / each["forward"] for each in figures)
    return row


def wanted(group: str, rows: Dict[str, report.Row]) -> List[report.Target]:
    """The targets of one precision and batch size."""
    precision = group.split(",")[0]
    targets = [
        report.Target(f"{group}: {name}, tokens/s x transformers", ratio, rows[name]["x transformers"], most=False)
        for name, ratio in WANTED[precision].items()
    ]
    if precision == "bfloat16":
        reached = rows[COMPILED]["of the limit"]
        targets.append(report.Target(f"{group}: {COMPILED}, of the limit", OF_LIMIT, reached, most=False))
    if "prompt / forward" in rows[EAGER]:
        ratio = rows[EAGER]["prompt / forward"]
        targets.append(report.Target(f"{group}: time of a prompt / the forward pass", OF_FORWARD, ratio))
    return targets


if __name__ == "__main__":
    sys.exit(main())
