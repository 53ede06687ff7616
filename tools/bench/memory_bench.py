"""Resident memory of a training step: beside transformers', and beside what megatron.costs estimates.

    python -m tools.bench.memory_bench [--parts peers estimate] [--precision bfloat16 fp32] [--out DIR]

peers: the step of train_bench, every line in a process of its own. The peak is that of one step, imports and states
included; "over rest" is what the step takes beyond what is held between steps. In bf16 ours holds fp32 master weights
and fp32 Adam states, transformers' only bf16 ones.
estimate: at three sizes, what is resident at most beyond what was before the model was built, in a process which gives
freed memory back at once. That also has what the code that runs first takes, a hundred MB whatever the size; so what a
tiny model takes beyond its own estimate is measured first and taken off.
"""

import argparse
import sys
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

from tools.bench import report
from tools.bench.shapes import FAST, settings
from tools.bench.workers import RETURNING_MALLOC, TUNED_MALLOC, Worker, interleaved, median

SIZES: Dict[str, Dict[str, Any]] = {
    "small": dict(
        num_layers=6, hidden_size=384, num_attention_heads=6, num_kv_heads=2, head_dim=96, seq_length=512,
        ffn_hidden_size=1024, padded_vocab_size=8192, train_micro_batch_size_per_gpu=4,
    ),
    "middle": dict(
        num_layers=8, hidden_size=512, num_attention_heads=8, num_kv_heads=4, head_dim=128, seq_length=1024,
        ffn_hidden_size=1536, padded_vocab_size=16384, train_micro_batch_size_per_gpu=2,
    ),
    "large": dict(
        num_layers=10, hidden_size=1024, num_attention_heads=8, num_kv_heads=8, head_dim=64, seq_length=512,
        ffn_hidden_size=2816, padded_vocab_size=16384, train_micro_batch_size_per_gpu=2,
    ),
}  # fmt: skip
"""The head_dim times heads is more than hidden_size, much more, and half of it."""
TINY: Dict[str, Any] = dict(
    num_layers=1, hidden_size=64, num_attention_heads=2, num_kv_heads=1, head_dim=32, seq_length=512,
    ffn_hidden_size=64, padded_vocab_size=128, train_micro_batch_size_per_gpu=1,
)  # fmt: skip
STEPS = 2
"""The first makes the optimizer's states, the second has them from its beginning."""


class Line(NamedTuple):
    """A step of the peers' part."""

    target: str
    overrides: Dict[str, Any]
    environment: Optional[Dict[str, str]] = None


PEER, OURS = "transformers", "ours, compiled"
CHECKPOINTED = {**FAST, "checkpoint_activations": True}
LINES: Dict[str, Line] = {
    PEER: Line("tools.bench.peers:training", {}),
    "ours": Line("tools.bench.ours:training", {}),
    OURS: Line("tools.bench.ours:training", FAST),
    "ours, compiled, tuned malloc": Line("tools.bench.ours:training", FAST, TUNED_MALLOC),
    "ours, compiled, checkpointed": Line("tools.bench.ours:training", CHECKPOINTED),
}
WANTED = 0.55
ALLOWED = 0.1
"""Of the measured peak, by which an estimate may be off."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__, "memory*")
    parser.add_argument("--parts", nargs="+", choices=("peers", "estimate"), default=["peers", "estimate"])
    parser.add_argument("--precision", nargs="+", choices=("bfloat16", "fp32"), default=["bfloat16", "fp32"])
    parser.add_argument(
        "--lines", nargs="+", choices=LINES, default=list(LINES), metavar="LINE", help="of the peers' part"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    if "peers" in options.parts:
        beside_peers(options)
    if "estimate" in options.parts:
        beside_estimates(options)
    return 0


def beside_peers(options: argparse.Namespace) -> None:
    """The peers' part: memory.json."""
    rows, targets = [], []
    for precision in options.precision:
        found = {name: peaks(name, precision, options.repeats) for name in options.lines}
        rows += [row(precision, name, found) for name in found]
        goal = f"{precision}: peak memory of the step / transformers'"
        targets.append(report.Target(goal, WANTED, found[OURS]["peak"] / found[PEER]["peak"]))
    picture = report.bars("peak, MiB", "peak resident memory, MiB")
    report.report(options.out, "memory", "memory of a training step", rows, targets=targets, picture=picture)


def beside_estimates(options: argparse.Namespace) -> None:
    """The estimates' part: memory_estimate.json."""
    rows = []
    for precision in options.precision:
        measured, expected = growth(TINY, precision)
        rows += [estimate(size, precision, measured - expected) for size in SIZES]
    worst = max(abs(each["estimate / measured"] - 1) for each in rows)
    targets = [report.Target("estimated memory of a step off by at most", ALLOWED, worst)]
    title = "memory of a training step, estimated and measured"
    report.report(options.out, "memory_estimate", title, rows, targets=targets)


def peaks(name: str, precision: str, repeats: int) -> Dict[str, float]:
    """Bytes of a line: `peak` and what is held at `rest`."""
    print(f"{precision}: {name} ...", flush=True)
    line = LINES[name]
    given = settings(**{**line.overrides, "precision": precision})
    with Worker(line.target, given, line.environment) as worker:
        figures = interleaved({name: worker}, repeats)[name]
    return dict(peak=median(figures, "peak_rss"), rest=median(figures, "rss_before"))


def row(precision: str, name: str, found: Dict[str, Dict[str, float]]) -> report.Row:
    """A line of the peers' part."""
    peak, rest = found[name]["peak"], found[name]["rest"]
    return {
        "line": f"{precision}: {name}",
        "peak, MiB": peak / 2**20,
        "x transformers": peak / found[PEER]["peak"],
        "over rest, MiB": (peak - rest) / 2**20,
        "over rest x transformers": (peak - rest) / (found[PEER]["peak"] - found[PEER]["rest"]),
    }


def estimate(size: str, precision: str, of_code: float) -> report.Row:
    """A line of the estimates' part. of_code: bytes that have nothing to do with the model."""
    measured, expected = growth(SIZES[size], precision)
    return {
        "line": f"{precision}: {size}",
        "peak, MiB": measured / 2**20,
        "of that code, MiB": of_code / 2**20,
        "estimate, MiB": expected / 2**20,
        "estimate / measured": expected / (measured - of_code),
    }


def growth(shape: Dict[str, Any], precision: str) -> Tuple[float, float]:
    """Bytes of a training step beyond what was resident before there was a model: measured and estimated."""
    from megatron import costs
    from megatron.neox_arguments import NeoXArgs

    given = settings(shape, max_position_embeddings=1024, precision=precision)
    expected = costs.memory_per_rank(NeoXArgs.from_dict(given), device="cpu").total
    with Worker("tools.bench.ours:training", given, RETURNING_MALLOC) as worker:
        figures = [worker.step() for _ in range(STEPS)]
    return max(each["peak_rss"] - each["rss_at_start"] for each in figures), expected


if __name__ == "__main__":
    sys.exit(main())
