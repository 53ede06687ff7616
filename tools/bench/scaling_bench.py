"""How time and memory grow with the length of texts, layers, head_dim and ranks, beside what megatron.costs says.

    python -m tools.bench.scaling_bench [--only length layers head_dim memory decode tp zero] [--out DIR]

Small models, trained by the real engine on two threads. Every part writes scaling_PART.json and scaling_PART.png;
`python -m tools.bench.scaling_page` makes docs/scaling.md of them. Times are medians of steps taken in turn.
"""

import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any, Callable, Dict, List, Optional, Sequence

from megatron import costs
from megatron.neox_arguments import NeoXArgs
from tools.bench import scaling_pictures
from tools.bench.report import Row, bars, parser, report
from tools.bench.scaling_shapes import (
    DECODED,
    SAME_WIDTH,
    TOKENS,
    Arguments,
    decoders,
    depths,
    head_dims,
    layouts,
    lengths,
    zero_stages,
)
from tools.bench.workers import RETURNING_MALLOC, TUNED_MALLOC, Figures, Worker, interleaved, median, median_ratio

ON_CPU = {"DS_ACCELERATOR": "cpu"}
REPEATS = 5
_STEPS = "tools.bench.scaling_steps"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the parts that are wanted."""
    options = parse(arguments)
    for part in options.only:
        PARTS[part](options.out, options.repeats)
    return 0


def parse(arguments: Optional[Sequence[str]] = None):
    """The command line."""
    line = parser(__doc__, "scaling_PART")
    line.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts; default: all")
    line.add_argument("--repeats", type=int, default=REPEATS, help="steps of each model; default: %(default)s")
    return line.parse_args(arguments)


def operations(arguments: Arguments, causal: bool) -> float:
    """Of a training step, as megatron.costs counts them; causal: without what a causal mask hides."""
    args = NeoXArgs.from_dict(arguments)
    return 3.0 * sum(costs.forward_flops(args, causal=causal).values()) * tokens_of(arguments)


def tokens_of(arguments: Arguments) -> int:
    """Tokens in one micro batch."""
    return arguments["train_micro_batch_size_per_gpu"] * arguments["seq_length"]


def measure_points(
    target: str, models: Dict[str, Arguments], repeats: int, environment: Dict[str, str], **more: Any
) -> Dict[str, List[Figures]]:
    """Figures of every model's steps, all models in turn in one process; a first round is left out."""
    with Worker(f"{_STEPS}:{target}", {"models": models, **more}, {**ON_CPU, **environment}) as worker:
        rounds = interleaved({"all": worker}, repeats)["all"]
    return {name: [each["points"][name] for each in rounds] for name in models}


def curve(name: str, models: Dict[str, Arguments], figures: Dict[str, List[Figures]]) -> List[Row]:
    """One row for each model: its time and its operations, also relative to those of the first."""
    first = next(iter(models))
    seconds = {each: median(figures[each]) for each in models}
    counts = {each: (operations(models[each], False), operations(models[each], True)) for each in models}
    return [
        {
            name: each,
            "seconds": seconds[each],
            "time / first": median_ratio(figures[each], figures[first]),
            "FLOPs / first": counts[each][0] / counts[first][0],
            "causal FLOPs / first": counts[each][1] / counts[first][1],
            "causal GFLOP/s": counts[each][1] / seconds[each] / 1e9,
            "tokens/s": tokens_of(models[each]) / seconds[each],
        }
        for each in models
    ]


def run_curve(name: str, title: str, models: Dict[str, Arguments], folder: str, repeats: int) -> None:
    """Measure one curve and report it."""
    figures = measure_points("training_steps", models, repeats, TUNED_MALLOC)
    rows = curve(name, models, figures)
    report(folder, f"scaling_{name}", title, rows, picture=scaling_pictures.against_operations(name))


def run_length(folder: str, repeats: int) -> None:
    """Time of a step over the length of its texts."""
    run_curve("length", f"{TOKENS} tokens in texts of this length", lengths(), folder, repeats)


def run_layers(folder: str, repeats: int) -> None:
    """Time of a step over the number of layers."""
    run_curve("layers", "Layers", depths(), folder, repeats)


def run_head_dim(folder: str, repeats: int) -> None:
    """Time of a step over head_dim, at equal parameters."""
    models = head_dims()
    figures = measure_points("training_steps", models, repeats, TUNED_MALLOC)
    rows = head_dim_rows(models, figures)
    report(folder, "scaling_head_dim", "head_dim at equal parameters", rows, picture=scaling_pictures.head_dim)


def head_dim_rows(models: Dict[str, Arguments], figures: Dict[str, List[Figures]]) -> List[Row]:
    """A curve for each kind and kernel, one after the other."""
    rows = []
    for start in range(0, len(models), len(SAME_WIDTH)):
        names = list(models)[start : start + len(SAME_WIDTH)]
        part = curve("model", {name: models[name] for name in names}, figures)
        for row in part:
            kind, kernel, width = row["model"].split(", ")
            parameters = costs.num_parameters(NeoXArgs.from_dict(models[row["model"]]))
            rows.append({"kind": kind, "kernel": kernel, "head_dim": int(width), "parameters": parameters, **row})
            del rows[-1]["model"]
    return rows


def run_memory(folder: str, repeats: int) -> None:
    """Memory of a step over head_dim and kernels, at equal parameters."""
    models = head_dims()
    figures = measure_points("training_steps", models, 2, {**RETURNING_MALLOC, "OMP_NUM_THREADS": "1"})
    rows = [memory_row(name, arguments, figures[name][-1]) for name, arguments in models.items()]
    title = "Memory that a step needs beyond what stays between steps"
    report(folder, "scaling_memory", title, rows, picture=scaling_pictures.memory)


def memory_row(name: str, arguments: Arguments, figures: Figures) -> Row:
    """What one model's step adds to weights and optimizer, and what the model's cache takes."""
    kind, kernel, width = name.split(", ")
    args = NeoXArgs.from_dict(arguments)
    estimate = costs.memory_per_rank(args, device="cpu")
    measured, wanted = (
        figures["peak_rss"] - figures["rss_before"],
        estimate.total - estimate.weights - estimate.optimizer,
    )
    return {
        "kind": kind,
        "kernel": kernel,
        "head_dim": int(width),
        "step, MB": measured / 1e6,
        "estimate, MB": wanted / 1e6,
        "measured / estimate": measured / wanted,
    }


def run_decode(folder: str, repeats: int) -> None:
    """Time and cache of decoding over head_dim, with a cache in the weights' precision and in int8."""
    models = decoders()
    figures = measure_points("decoding", models, repeats, TUNED_MALLOC, **DECODED)
    rows = []
    for name, arguments in models.items():
        kind, width, dtype = name.split(", ")
        tokens = DECODED["prompt"] + DECODED["new"] - 1
        rows.append(
            {
                "kind": kind,
                "head_dim": int(width),
                "cache": dtype,
                "ms per token": 1e3 * median(figures[name]),
                "cache, MB": median(figures[name], "cache_bytes") / 1e6,
                "formula, MB": costs.kv_cache_bytes(NeoXArgs.from_dict(arguments), DECODED["batch"], tokens) / 1e6,
            }
        )
    title = f"Decoding {DECODED['batch']} texts after {DECODED['prompt']} tokens"
    report(folder, "scaling_decode", title, rows, picture=scaling_pictures.decode)


def run_tp(folder: str, repeats: int) -> None:
    """One process of two threads beside two of one thread."""
    with tempfile.TemporaryDirectory() as stores, ExitStack() as stack:
        workers = {
            name: stack.enter_context(_ranks(arguments, processes, os.path.join(stores, str(number)), threads))
            for number, (name, (arguments, processes, threads)) in enumerate(layouts().items())
        }
        figures = interleaved(workers, repeats)
    alone = figures["1 process, 1 thread"]
    rows = [
        {"layout": name, "seconds": median(steps), "speed / 1 thread": median_ratio(alone, steps)}
        for name, steps in figures.items()
    ]
    report(folder, "scaling_tp", "Two cores in four ways", rows, picture=bars("speed / 1 thread", "speed-up", 2.0))


def run_zero(folder: str, repeats: int) -> None:
    """Memory of each of two ranks under every stage of ZeRO, beside the estimate."""
    rows = []
    with tempfile.TemporaryDirectory() as stores:
        for name, arguments in zero_stages().items():
            with _ranks(arguments, 2, os.path.join(stores, name), 1, RETURNING_MALLOC) as worker:
                found = interleaved({name: worker}, 2)[name][-1]["rank_bytes"]
            args = NeoXArgs.from_dict(arguments)
            estimate = costs.memory_per_rank(args, device="cpu").total
            precision, stage = name.split(", ")
            rows.append(
                {
                    "precision": precision,
                    "stage": stage,
                    "fullest rank, MB": max(found) / 1e6,
                    "other rank, MB": min(found) / 1e6,
                    "estimate, MB": estimate / 1e6,
                    "measured / estimate": max(found) / estimate,
                }
            )
    report(folder, "scaling_zero", "Memory per rank, two ranks", rows, picture=scaling_pictures.zero)


def _ranks(
    arguments: Arguments, processes: int, store: str, threads: int, environment: Optional[Dict[str, str]] = None
) -> Worker:
    own = {"arguments": arguments, "world_size": processes, "store": store}
    threading = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    return Worker(f"{_STEPS}:ranks", own, {**ON_CPU, **threading, **(environment or TUNED_MALLOC)})


PARTS: Dict[str, Callable[[str, int], None]] = {
    "length": run_length,
    "layers": run_layers,
    "head_dim": run_head_dim,
    "memory": run_memory,
    "decode": run_decode,
    "tp": run_tp,
    "zero": run_zero,
}

if __name__ == "__main__":
    sys.exit(main())
