"""A study's pictures, from its summary."""

import os
from typing import Any, Callable, Dict, List

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from tools.head_dim.sweep.summary import mean  # noqa: E402
from tools.head_dim.sweep.tables import FIGURES  # noqa: E402

GREY = "#777777"
DPI = 110
MIB = 2**20
MARKERS = "osD^vPX"
FALL = 0.2
"""Of all steps: what the loss is before them need not be seen."""


def draw(summary: Dict[str, Any], folder: str, prefix: str = "") -> Dict[str, str]:
    """{what: path} of the PNGs that could be drawn: curves, ranking, costs, heads."""
    written = {}
    for name in drawn(summary):
        figure = PAINTERS[name](summary)
        written[name] = os.path.join(folder, f"{prefix}{name}.png")
        figure.savefig(written[name], dpi=DPI)
        plt.close(figure)
    return written


def drawn(summary: Dict[str, Any]) -> List[str]:
    """Which pictures there is something for."""
    variants = summary["variants"]
    there = {
        "curves": any(each["train"]["step"] for each in variants),
        "ranking": bool(summary["ranking"]),
        "costs": any(each["tokens_per_second"] for each in variants),
        "heads": any(each["heads"]["figures"] for each in variants),
    }
    return [name for name in PAINTERS if there[name]]


def curves(summary: Dict[str, Any]) -> Figure:
    """Training and validation loss: a line for the mean over seeds in a band from the least to the most."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    colours = _colours(summary["variants"])
    for axis, key, title in zip(panels, ("train", "validation"), ("training", "validation"), strict=True):
        for each, colour, marker in zip(summary["variants"], colours, MARKERS * len(colours), strict=False):
            curve = each[key]
            mark = marker if key == "validation" else None
            axis.plot(curve["step"], curve["mean"], color=colour, marker=mark, markersize=4, label=each["name"])
            axis.fill_between(curve["step"], curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
        axis.set_title(f"{title} loss: mean over seeds, band from least to most", fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        _from_the_fall(axis, [each[key] for each in summary["variants"]])
    panels[0].set_ylabel("nats per token")
    panels[1].legend(fontsize=8)
    return figure


def _from_the_fall(axis: Axes, shown: List[Dict[str, List[float]]]) -> None:
    """The first steps fall so far that the curves' differences would not be seen."""
    late = [
        value
        for curve in shown
        for value, step in zip(curve["high"], curve["step"], strict=True)
        if step >= FALL * max(curve["step"])
    ]
    low = min((min(curve["low"]) for curve in shown if curve["low"]), default=None)
    if low is not None and late:
        room = 0.05 * (max(late) - low) or 0.1
        axis.set_ylim(low - room, max(late) + room)


def ranking(summary: Dict[str, Any]) -> Figure:
    """The last validation losses, best above, and their differences to the baseline."""
    rows = summary["ranking"]
    baseline = summary["study"]["baseline"]
    of = {each["name"]: each["last_validation"] for each in summary["variants"]}
    figure, panels = plt.subplots(1, 2, figsize=(12, 1.4 + 0.42 * len(rows)), sharey=True, layout="constrained")
    for place, row in enumerate(rows):
        losses = of[row["variant"]]
        _mean_and_dots(panels[0], place, row["mean"], row["interval"], list(losses.values()))
        apart = [losses[seed] - of[baseline][seed] for seed in losses.keys() & of[baseline].keys()]
        if row["difference"] is not None:
            _mean_and_dots(panels[1], place, row["difference"], row["difference_interval"], apart)
    panels[0].set_yticks(range(len(rows)), [row["variant"] for row in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    panels[0].set_xlabel("last validation loss, nats per token")
    panels[1].set_xlabel(f"difference to {baseline}, paired by seed")
    panels[1].axvline(0, color=GREY, linewidth=1, linestyle="--")
    for axis in panels:
        axis.grid(alpha=0.3, axis="x")
        axis.locator_params(axis="x", nbins=6)
    figure.suptitle("dots: seeds; line: 95 % interval of the mean (Student's t)", fontsize=10)
    return figure


def _mean_and_dots(axis: Axes, place: float, middle: float, interval: Any, values: List[float]) -> None:
    if interval is not None:
        axis.plot(interval, [place, place], color="#4878a8", linewidth=2, zorder=1)
    axis.plot([middle], [place], marker="|", color="#4878a8", markersize=14, markeredgewidth=2, linestyle="", zorder=2)
    axis.plot(values, [place] * len(values), marker="o", color="#c44e52", markersize=4, linestyle="", zorder=3)


def costs(summary: Dict[str, Any]) -> Figure:
    """Speed and memory as measured, parameters and FLOPs as counted."""
    variants = summary["variants"]
    shown = {
        "tokens/s, measured": [each["tokens_per_second"] for each in variants],
        "peak resident memory, MiB, measured": [[rss / MIB for rss in each["peak_rss_bytes"]] for each in variants],
        "memory by the cost model, MiB": [[each["memory_estimate_bytes"] / MIB] for each in variants],
        "parameters, millions": [[each["parameters"] / 1e6] for each in variants],
        "FLOPs per token, millions": [[each["flops_per_token"] / 1e6] for each in variants],
    }
    return _panels(shown, [each["name"] for each in variants], columns=3, zero=True)


def heads(summary: Dict[str, Any]) -> Figure:
    """What the heads did at the last look."""
    looked = [each for each in summary["variants"] if each["heads"]["figures"]]
    shown = {
        title: [each["heads"]["figures"].get(name, []) for each in looked]
        for name, title in FIGURES.items()
        if any(name in each["heads"]["figures"] for each in looked)
    }
    return _panels(shown, [each["name"] for each in looked], columns=4)


PAINTERS: Dict[str, Callable[[Dict[str, Any]], Figure]] = {
    "curves": curves,
    "ranking": ranking,
    "costs": costs,
    "heads": heads,
}


def _panels(shown: Dict[str, List[List[float]]], names: List[str], columns: int, zero: bool = False) -> Figure:
    """A panel for each figure: a dot for each run, a line through the means."""
    rows = -(-len(shown) // columns)
    label_room = min(1.6, 0.07 * max(map(len, names)))
    size = (3.6 * columns, 2.4 * rows + label_room)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for number, (axis, (title, values)) in enumerate(zip(axes.flat, shown.items(), strict=False)):
        means = [mean(each) for each in values]
        axis.plot(range(len(names)), [value if value is not None else float("nan") for value in means], color="#4878a8")
        for place, each in enumerate(values):
            axis.plot([place] * len(each), each, marker="o", color="#c44e52", markersize=4, linestyle="")
        axis.set_title(title, fontsize=9)
        lowest = number + columns >= len(shown)  # of its column
        axis.set_xticks(range(len(names)), names if lowest else [""] * len(names), rotation=35, ha="right", fontsize=8)
        axis.tick_params(axis="y", labelsize=8)
        axis.grid(alpha=0.3)
        axis.margins(x=0.1)
        if zero:
            axis.set_ylim(0, 1.15 * max((value for each in values for value in each), default=1.0))
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    return figure


def _colours(variants: List[Dict[str, Any]]) -> List[Any]:
    """In order from dark to bright, as the variants are listed."""
    scale = plt.get_cmap("viridis")
    return [scale(0.9 * place / max(1, len(variants) - 1)) for place in range(len(variants))]
