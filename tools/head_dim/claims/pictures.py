"""A picture for each claim: what was measured, and the number that decides with the range that the claim wants."""

import math
import os
import textwrap
from typing import Any, Callable, Dict, List, Optional, Tuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from tools.head_dim.claims.verdict import Verdict  # noqa: E402

BLUE, RED, GREY = "#1f6fb4", "#c0392b", "#777777"
DPI = 100


def picture_name(verdict: Verdict) -> str:
    """Of its file."""
    return f"claims_{verdict.claim.name}.png"


def draw(verdict: Verdict, study: Dict[str, Any], folder: str) -> str:
    """Write the PNG; returns its path."""
    path = os.path.join(folder, picture_name(verdict))
    figure = figure_of(verdict, study)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path


def figure_of(verdict: Verdict, study: Dict[str, Any]) -> Figure:
    """Left what was measured, right the number that decides, seed by seed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=(3, 2))
    figure.suptitle(f"{verdict.claim.says}: {verdict.verdict}", fontsize=11)
    LEFT[verdict.claim.name](left, verdict, study)
    _deciding(right, verdict)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    return figure


def _deciding(axis: Axes, verdict: Verdict) -> None:
    effects, (low, high) = verdict.measured.effects, verdict.claim.wanted
    seen = [*effects.values(), low, *(verdict.interval or ()), *([high] if math.isfinite(high) else [])]
    room = 0.15 * (max(seen) - min(seen)) or 1.0
    top = max(seen) + room
    axis.axhspan(low, min(high, top), color=BLUE, alpha=0.12, label=f"claimed: {verdict.claim.wanted}")
    axis.plot(list(effects), list(effects.values()), "o", color=GREY, label="each seed")
    if verdict.interval is not None:
        middle = max(effects) + 1
        below, above = verdict.mean - verdict.interval[0], verdict.interval[1] - verdict.mean
        axis.errorbar([middle], [verdict.mean], [[below], [above]], fmt="s", color=RED, capsize=5, label="mean, 95 %")
    axis.set_ylim(min(seen) - room, top)
    axis.set_xticks(list(effects))
    axis.set_xlabel("seed", labelpad=1)
    axis.set_title(_wrapped(verdict.claim.quantity), fontsize=9)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _rank(axis: Axes, verdict: Verdict, study: Dict[str, Any]) -> None:
    rows = verdict.measured.rows
    widths = [row["head_dim"] for row in rows]
    for name, colour in (("effective rank of attention", BLUE), ("effective rank of the scores", RED)):
        axis.plot(widths, _numbers(rows, name), "o-", color=colour, label=name)
    axis.plot(widths, widths, "--", color=GREY, label="head_dim, the bound of the scores' rank")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    _over_widths(axis, widths)
    axis.legend(fontsize=8)


def _gradients(axis: Axes, verdict: Verdict, study: Dict[str, Any]) -> None:
    rows = verdict.measured.rows
    widths = [row["head_dim"] for row in rows]
    names = [name for name in rows[0] if name != "head_dim"]
    for name, style in zip(names, (("o-", BLUE), ("s-", RED), ("^:", RED), ("--", GREY)), strict=True):
        axis.plot(widths, _numbers(rows, name), style[0], color=style[1], label=name)
    _over_widths(axis, widths)
    axis.legend(fontsize=8)


def _learning_rate(axis: Axes, verdict: Verdict, study: Dict[str, Any]) -> None:
    for row, colour in zip(verdict.measured.rows, (BLUE, RED), strict=True):
        losses = {float(name.split()[-1]): value for name, value in row.items() if name.startswith("loss at")}
        label = f"head_dim {row['head_dim']}"
        axis.plot(
            list(losses), [math.nan if v is None else v for v in losses.values()], "o-", color=colour, label=label
        )
        if row["best rate"]:
            axis.axvline(row["best rate"], color=colour, linestyle=":", label=f"its best: {row['best rate']:.2g}")
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(losses), [f"{rate:g}" for rate in losses])
    axis.set_xlabel("learning rate")
    axis.set_ylabel("validation loss, mean over seeds")
    axis.legend(fontsize=8)


def _losses(axis: Axes, verdict: Verdict, study: Dict[str, Any]) -> None:
    names = [each["name"] for each in study["variants"]]
    places = range(len(names))
    by_seed: Dict[int, List[Optional[float]]] = {}
    for run in study["runs"]:
        by_seed.setdefault(run["seed"], [None] * len(names))[names.index(run["variant"])] = run["loss"]
    for seed, losses in by_seed.items():
        known = [math.nan if None in (loss, losses[0]) else loss - losses[0] for loss in losses]
        axis.plot(places, known, "o-", linewidth=0.8, label=str(seed))
    axis.set_xticks(list(places), [_wrapped(name, 24) for name in names], fontsize=9)
    axis.set_xlim(-0.3, len(names) - 0.7)
    axis.set_ylabel("loss less that of the first")
    axis.legend(title="seed", fontsize=8)


LEFT: Dict[str, Callable[[Axes, Verdict, Dict[str, Any]], None]] = {
    "rank": _rank,
    "gradients": _gradients,
    "learning_rate": _learning_rate,
    "rotary": _losses,
    "depth": _losses,
}


def _over_widths(axis: Axes, widths: List[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(widths, [str(width) for width in widths])
    axis.set_xlabel("head_dim")


def _numbers(rows: List[Dict[str, Any]], name: str) -> Tuple[float, ...]:
    return tuple(math.nan if row[name] is None else row[name] for row in rows)


def _wrapped(text: str, width: int = 48) -> str:
    return "\n".join(textwrap.wrap(text, width))
