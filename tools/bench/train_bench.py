"""A training step beside transformers' and beside the time of its bare matrix products, in one run.

    python -m tools.bench.train_bench [--precision bfloat16 fp32] [--only WORD ...] [--repeats N] [--out DIR]

Every line is a process of its own; they make their steps in turn. Ratios are medians over the rounds of two neighbours.
Ours goes through the engine and `train_step`: fp32 master weights and Adam states in bf16 too, gradients clipped.
transformers' is what its users write: weights and Adam states in the precision of the run, nothing clipped. With tuned
malloc, glibc keeps freed memory for the next step, which our entry points ask for. "by hand" is our model without
DeepSpeed and the loop, with the same arithmetic in the optimizer: what the whole step takes more is overhead.
"""

import sys
from contextlib import ExitStack
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from tools.bench import report
from tools.bench.shapes import FAST, settings
from tools.bench.workers import TUNED_MALLOC, Figures, Worker, interleaved, median, median_ratio


class Line(NamedTuple):
    """What is measured. whole: with the optimizer; tuned: malloc."""

    target: str
    overrides: Dict[str, Any]
    tuned: bool = True
    whole: bool = True


LIMIT, PEER, PEER_TUNED, PEER_PART = "matrix products", "transformers", "transformers, tuned", "transformers, fwd+bwd"
FASTEST, EAGER, BY_HAND, PART = "ours, compiled", "ours", "ours, compiled, by hand", "ours, compiled, fwd+bwd"
LINES: Dict[str, Line] = {
    LIMIT: Line("tools.bench.limits:matrix_products", {}, whole=False),
    PEER_PART: Line("tools.bench.peers:forward_backward", {}, whole=False),
    PART: Line("tools.bench.ours:forward_backward", FAST, whole=False),
    "ours, fwd+bwd": Line("tools.bench.ours:forward_backward", {}, whole=False),
    PEER: Line("tools.bench.peers:training", {}, tuned=False),
    PEER_TUNED: Line("tools.bench.peers:training", {}),
    FASTEST: Line("tools.bench.ours:training", FAST),
    BY_HAND: Line("tools.bench.ours:without_engine", FAST),
    "ours, compiled, pipeline engine": Line("tools.bench.ours:training", {**FAST, "pipe_parallel_size": 1}),
    EAGER: Line("tools.bench.ours:training", {}),
    "ours, untuned": Line("tools.bench.ours:training", {}, tuned=False),
    "matrix products, untuned": Line("tools.bench.limits:matrix_products", {}, tuned=False, whole=False),
}
WANTED = {"bfloat16": (1.8, 2.2, 1.7), "fp32": (1.4, 1.25, None)}
"""Forward and backward / limit at most; tokens/s of the step / transformers' at least, and with the same malloc."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__, "train")
    parser.add_argument("--precision", nargs="+", choices=WANTED, default=list(WANTED))
    parser.add_argument("--only", nargs="+", choices=LINES, default=list(LINES), metavar="LINE", help="some lines")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    rows, targets = [], []
    for precision in options.precision:
        measured = steps(precision, options.only, options.repeats)
        rows += [row(precision, name, measured) for name in measured]
        targets += wanted(precision, measured)
    picture = report.bars("step / limit", "time / time of the matrix products", limit=1.0)
    report.report(options.out, "train", "training step, 65 M Qwen3", rows, targets=targets, picture=picture)
    return 0


def steps(precision: str, names: Sequence[str], repeats: int, **overrides: Any) -> Dict[str, List[Figures]]:
    """Line -> its steps in the order of the rounds. The first two are not kept: one compiles, one touches memory."""
    with ExitStack() as stack:
        workers = {}
        for name in names:
            line = LINES[name]
            given = settings(**{**line.overrides, "precision": precision, **overrides})
            workers[name] = stack.enter_context(Worker(line.target, given, TUNED_MALLOC if line.tuned else None))
        return interleaved(workers, repeats, warmup=2)


def row(precision: str, name: str, measured: Dict[str, List[Figures]]) -> report.Row:
    """A line of the table."""
    figures, shape = measured[name], settings()
    tokens = shape["train_micro_batch_size_per_gpu"] * shape["seq_length"]
    result = {
        "line": f"{precision}: {name}",
        "malloc": "tuned" if LINES[name].tuned else "as it is",
        "seconds": median(figures),
        "tokens/s": tokens / median(figures),
        "step / limit": ratio(measured, name, LIMIT),
    }
    if LINES[name].whole:
        result["x transformers"] = ratio(measured, PEER, name)
        result["x transformers, tuned"] = ratio(measured, PEER_TUNED, name)
    else:
        result["x transformers, tuned"] = ratio(measured, PEER_PART, name)
    result["cores busy"] = median(figures, "cpu_seconds") / median(figures)
    result["peak RSS, MiB"] = median(figures, "peak_rss") / 2**20
    return result


def ratio(measured: Dict[str, List[Figures]], name: str, other: str) -> Optional[float]:
    """Time of a line / time of another; None where one was not measured."""
    if name not in measured or other not in measured:
        return None
    return median_ratio(measured[name], measured[other])


def wanted(precision: str, measured: Dict[str, List[Figures]]) -> List[report.Target]:
    """The targets of one precision."""
    limit, peer, same = WANTED[precision]
    overhead = ratio(measured, BY_HAND, FASTEST)
    targets = [
        report.Target(f"{precision}: forward + backward / matrix products", limit, ratio(measured, PART, LIMIT)),
        report.Target(f"{precision}: step, tokens/s x transformers", peer, ratio(measured, PEER, FASTEST), most=False),
        report.Target(
            f"{precision}: DeepSpeed's and the loop's share of the step",
            0.05,
            None if overhead is None else 1 - overhead,
        ),
    ]
    if same is not None:
        name = f"{precision}: the same, both with tuned malloc"
        targets.insert(2, report.Target(name, same, ratio(measured, PEER_TUNED, FASTEST), most=False))
    return targets


if __name__ == "__main__":
    sys.exit(main())
