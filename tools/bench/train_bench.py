"""A training step beside transformers' and beside the time of its bare matrix products, in one run.

    python -m tools.bench.train_bench [--precision bfloat16 fp32] [--groups step ...] [--repeats N] [--out DIR]

Every line is a process of its own; those of a group make their steps in turn. Ratios are medians over the rounds, and
go by way of the matrix products, which every group has, where two lines are not of one group.
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


Steps = Dict[str, List[Figures]]
"""Line -> its steps in the order of the rounds."""

LIMIT, PEER, PEER_TUNED, PEER_PART = "matrix products", "transformers", "transformers, tuned", "transformers, fwd+bwd"
FASTEST, EAGER, BY_HAND, PART = "ours, compiled", "ours", "ours, compiled, by hand", "ours, compiled, fwd+bwd"
PIPELINE, EAGER_PART = "ours, compiled, pipeline engine", "ours, fwd+bwd"
EAGER_UNTUNED, LIMIT_UNTUNED = "ours, untuned", "matrix products, untuned"
LINES: Dict[str, Line] = {
    LIMIT: Line("tools.bench.limits:matrix_products", {}, whole=False),
    PEER_PART: Line("tools.bench.peers:forward_backward", {}, whole=False),
    PART: Line("tools.bench.ours:forward_backward", FAST, whole=False),
    EAGER_PART: Line("tools.bench.ours:forward_backward", {}, whole=False),
    PEER: Line("tools.bench.peers:training", {}, tuned=False),
    PEER_TUNED: Line("tools.bench.peers:training", {}),
    FASTEST: Line("tools.bench.ours:training", FAST),
    BY_HAND: Line("tools.bench.ours:without_engine", FAST),
    PIPELINE: Line("tools.bench.ours:training", {**FAST, "pipe_parallel_size": 1}),
    EAGER: Line("tools.bench.ours:training", {}),
    EAGER_UNTUNED: Line("tools.bench.ours:training", {}, tuned=False),
    LIMIT_UNTUNED: Line("tools.bench.limits:matrix_products", {}, tuned=False, whole=False),
}
GROUPS = {
    "step": (LIMIT, PEER, PEER_TUNED, FASTEST, PART, BY_HAND),
    "short": (LIMIT, PEER, FASTEST, PART),
    "eager": (LIMIT, PEER_PART, EAGER, EAGER_PART),
    "other": (LIMIT, LIMIT_UNTUNED, EAGER_UNTUNED, PIPELINE),
}
"""What is measured in turn; more at a time would take more memory than many machines have."""
WANTED = {"bfloat16": (1.8, 2.2, 1.7), "fp32": (1.4, 1.25, None)}
"""Forward and backward / limit at most; tokens/s of the step / transformers' at least, and with the same malloc."""
MEMORY = 0.55
"""Peak memory of the step / transformers' at most."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__, "train_PRECISION")
    parser.add_argument("--precision", nargs="+", choices=WANTED, default=list(WANTED))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=["step", "eager", "other"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    for precision in options.precision:
        measured = Measured([steps(precision, GROUPS[group], options.repeats) for group in options.groups])
        rows = [row(name, measured) for name in measured.names]
        title = f"training step, 65 M Qwen3, {precision}"
        picture = report.bars("step / limit", "time / time of the matrix products", limit=1.0)
        report.report(
            options.out, f"train_{precision}", title, rows, targets=wanted(precision, measured), picture=picture
        )
    return 0


def steps(precision: str, names: Sequence[str], repeats: int, **overrides: Any) -> Steps:
    """The steps of a group after a first round, in which layers are compiled and memory is touched."""
    with ExitStack() as stack:
        workers = {}
        for name in names:
            line = LINES[name]
            given = settings(**{**line.overrides, "precision": precision, **overrides})
            workers[name] = stack.enter_context(Worker(line.target, given, TUNED_MALLOC if line.tuned else None))
        return interleaved(workers, repeats)


class Measured:
    """The groups of a precision. names: the lines in them."""

    def __init__(self, groups: Sequence[Steps]):
        self._groups = groups
        self.names = list(dict.fromkeys(name for group in groups for name in group))

    def figures(self, name: str) -> List[Figures]:
        """The steps of a line, of the first group that has it."""
        return next(group[name] for group in self._groups if name in group)

    def ratio(self, name: str, other: str) -> Optional[float]:
        """Time of a line / time of another: in a group of both, else by way of the limit; None if one is missing."""
        if name not in self.names or other not in self.names:
            return None
        for group in self._groups:
            if name in group and other in group:
                return median_ratio(group[name], group[other])
        return self.ratio(name, LIMIT) / self.ratio(other, LIMIT)


def row(name: str, measured: Measured) -> report.Row:
    """A line of the table."""
    figures, shape = measured.figures(name), settings()
    tokens = shape["train_micro_batch_size_per_gpu"] * shape["seq_length"]
    result = {
        "line": name,
        "malloc": "tuned" if LINES[name].tuned else "as it is",
        "seconds": median(figures),
        "tokens/s": tokens / median(figures),
        "step / limit": measured.ratio(name, LIMIT),
    }
    if LINES[name].whole:
        result["x transformers"] = measured.ratio(PEER, name)
        result["x transformers, tuned"] = measured.ratio(PEER_TUNED, name)
    elif name != LIMIT:
        result["x transformers, tuned"] = measured.ratio(PEER_PART, name)
    result["cores busy"] = median(figures, "cpu_seconds") / median(figures)
    result["peak RSS, MiB"] = median(figures, "peak_rss") / 2**20
    return result


def wanted(precision: str, measured: Measured) -> List[report.Target]:
    """The targets of one precision."""
    limit, peer, same = WANTED[precision]
    by_hand = measured.ratio(BY_HAND, FASTEST)
    overhead = None if by_hand is None else 1 - by_hand
    targets = [
        report.Target(f"{precision}: forward + backward / matrix products", limit, measured.ratio(PART, LIMIT)),
        report.Target(f"{precision}: step, tokens/s x transformers", peer, measured.ratio(PEER, FASTEST), most=False),
        report.Target(f"{precision}: DeepSpeed's and the loop's share of the step", 0.05, overhead),
    ]
    if PEER in measured.names and FASTEST in measured.names:
        ours, theirs = (median(measured.figures(name), "peak_rss") for name in (FASTEST, PEER))
        targets.append(report.Target(f"{precision}: peak memory of the step / transformers'", MEMORY, ours / theirs))
    if same is not None:
        name = f"{precision}: the same, both with tuned malloc"
        targets.insert(2, report.Target(name, same, measured.ratio(PEER_TUNED, FASTEST), most=False))
    return targets


if __name__ == "__main__":
    sys.exit(main())
