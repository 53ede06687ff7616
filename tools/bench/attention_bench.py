"""Peak memory of attention, forward and backward, against the length of the sequence, for each of our kernels.

    python -m tools.bench.attention_bench [--tokens 1024 2048 4096 8192] [--kernels flash chunked global] [--out DIR]

8 query and 4 key-value heads of 128, batch 1, bf16, causal. Every kernel and length is a process of its own, which
gives freed memory back at once. The growth of its resident memory over what it holds between steps (inputs and their
gradients, which are linear) is shown.
"""

import sys
from typing import Any, Callable, Dict, Optional, Sequence

import torch

from tools.bench import report
from tools.bench.workers import RETURNING_MALLOC, Worker, interleaved, median

KERNELS = ("flash", "chunked", "global")
LINEAR = ("flash", "chunked")
HEADS, KV_HEADS, WIDTH = 8, 4, 128


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__, "attention")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    rows = []
    for kernel in options.kernels:
        for tokens in sorted(options.tokens):
            rows.append(measured(kernel, tokens, options.repeats))
    title = "attention, forward and backward"
    report.report(options.out, "attention", title, rows, targets=targets(rows), picture=draw)
    return 0


def measured(kernel: str, tokens: int, repeats: int) -> report.Row:
    """A line of the table."""
    settings = dict(kernel=kernel, tokens=tokens)
    with Worker("tools.bench.attention_bench:attention", settings, RETURNING_MALLOC) as worker:
        figures = interleaved({kernel: worker}, repeats)[kernel]
    growth = [dict(bytes=each["peak_rss"] - each["rss_before"]) for each in figures]
    return {"kernel": kernel, "tokens": tokens, "MiB": median(growth, "bytes") / 2**20}


def attention(settings: Dict[str, Any]) -> Callable[[], None]:
    """A worker: one kernel, forward and backward; the gradients are written to memory that is there already."""
    from megatron.model.attention.core import KERNELS as MODULES

    kernel, tokens = MODULES[settings["kernel"]], settings["tokens"]
    make = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(tokens, 1, heads, WIDTH, generator=make).bfloat16().requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )  # [s, b, n or m, d]
    upstream = torch.ones_like(q)

    def step() -> None:
        kernel.attend(q, k, v, scale=WIDTH**-0.5, causal_offset=0, training=True).backward(upstream)

    return step


def targets(rows: Sequence[report.Row]) -> list:
    """Memory of the longest sequence / that of the shortest, over the ratio of their lengths: 1 if linear."""
    result = []
    for kernel in LINEAR:
        own = [row for row in rows if row["kernel"] == kernel]
        if len(own) > 1:
            first, last = own[0], own[-1]
            growth = (last["MiB"] / last["tokens"]) / (first["MiB"] / first["tokens"])
            name = f"{kernel}: memory per token at {last['tokens']} tokens / at {first['tokens']}"
            result.append(report.Target(name, 1.1, growth))
    return result


def draw(figure: Any, rows: Sequence[report.Row]) -> None:
    """Memory over tokens, both logarithmic: a line of slope one is linear."""
    figure.set_size_inches(6, 4)
    axes = figure.add_subplot()
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == kernel]
        axes.plot([row["tokens"] for row in own], [row["MiB"] for row in own], marker="o", label=kernel)
    lengths = sorted({row["tokens"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("peak memory of attention, MiB")
    axes.grid(alpha=0.3)
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
