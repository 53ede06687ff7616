"""From a study's figures (see `figures`) to one number for each seed. Pure functions."""

import math
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean, median
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple


@dataclass(frozen=True)
class Measured:
    """effects: {seed: the number}. left_out: {seed: why it has none}. rows: for the page, each a mapping of columns."""

    effects: Dict[int, float]
    left_out: Dict[int, str] = field(default_factory=dict)
    rows: List[Dict[str, Any]] = field(default_factory=list)


def rank_per_doubling(study: Dict[str, Any]) -> Measured:
    """2 ** slope of log2(effective rank of attention) over log2(head_dim), by least squares. The rank is the mean over
    heads and layers, at the last look."""
    by_seed = _by_seed(study)
    effects, left_out = {}, {}
    for seed, runs in by_seed.items():
        points = [
            (math.log2(width), math.log2(rank)) for width, run in runs.items() if (rank := _last(run, "attention_rank"))
        ]
        if len(points) < len(_widths(study)):
            left_out[seed] = "a run has no figures of its heads"
        else:
            effects[seed] = 2 ** _slope(points)
    rows = [
        {
            "head_dim": width,
            "effective rank of attention": _mean_of(by_seed, width, "attention_rank"),
            "effective rank of the scores": _mean_of(by_seed, width, "score_rank"),
            "most of any head": _most(by_seed, width, "score_rank"),
            "validation loss": _mean_loss(by_seed, width),
        }
        for width in _widths(study)
    ]
    return Measured(effects, left_out, rows)


def gradient_ratio(study: Dict[str, Any], wide: int = 64, usual: int = 16) -> Measured:
    """A head's gradient norm (geometric mean over heads and layers, median over the looks), wide by usual."""
    by_seed = _by_seed(study)
    effects, left_out = {}, {}
    for seed, runs in by_seed.items():
        norms = [_gradient(runs.get(width)) for width in (wide, usual)]
        if norms[0] and norms[1]:
            effects[seed] = norms[0] / norms[1]
        else:
            left_out[seed] = "a run has no figures of its heads"
    rows = []
    for width in _widths(study):
        ratios = _ratios(by_seed, width, usual)
        rows.append(
            {
                "head_dim": width,
                f"gradient norm of a head / that at {usual}": ratios,
                "of the whole model": _ratios(by_seed, width, usual, lambda run: run["grad_norm"]),
                "of the whole model, first steps": _ratios(by_seed, width, usual, lambda run: run["first_grad_norm"]),
                "square root of the width": math.sqrt(width / usual),
            }
        )
    return Measured(effects, left_out, rows)


def rate_exponent(study: Dict[str, Any]) -> Measured:
    """log(best rate of the widest / of the narrowest heads) by log(ratio of their widths).

    The best rate is the vertex of the parabola through the loss over log2(rate) at the best rate tried and its two
    neighbours. A seed whose best rate is the lowest or the highest one tried, or beside a run that diverged, has none.
    """
    narrow, *_, wide = _widths(study)
    effects, left_out, best = {}, {}, {narrow: [], wide: []}
    seeds = sorted({run["seed"] for run in study["runs"]})
    for seed in seeds:
        found = {width: _best_rate(_losses_by_rate(study, seed, width)) for width in (narrow, wide)}
        for width, rate in found.items():
            if rate:
                best[width].append(rate)
        if all(found.values()):
            effects[seed] = math.log(found[wide] / found[narrow]) / math.log(wide / narrow)
        else:
            at = " and ".join(str(width) for width in (narrow, wide) if not found[width])
            left_out[seed] = f"head_dim {at}: the best rate tried has no two neighbours that trained"
    rows = []
    for width in (narrow, wide):
        curves = [_losses_by_rate(study, seed, width) for seed in seeds]
        row: Dict[str, Any] = {"head_dim": width}
        for rate in sorted(set().union(*curves)):
            row[f"loss at {rate:g}"] = _mean([curve.get(rate) for curve in curves])
        row["best rate"] = geometric_mean(best[width]) if best[width] else None
        rows.append(row)
    return Measured(effects, left_out, rows)


def gain(baseline: str, other: str) -> Callable[[Dict[str, Any]], Measured]:
    """How much lower the last validation loss of a variant is than the baseline's, of the same seed."""

    def measured(study: Dict[str, Any]) -> Measured:
        losses: Dict[str, Dict[int, float]] = {each["name"]: {} for each in study["variants"]}
        seeds = sorted({run["seed"] for run in study["runs"]})
        for run in study["runs"]:
            if run["loss"] is not None:
                losses[run["variant"]][run["seed"]] = run["loss"]
        effects, left_out = {}, {}
        for seed in seeds:
            if seed in losses[baseline] and seed in losses[other]:
                effects[seed] = losses[baseline][seed] - losses[other][seed]
            else:
                left_out[seed] = "a run did not finish"
        rows = [_loss_row(name, losses[name], losses[baseline]) for name in losses]
        return Measured(effects, left_out, rows)

    return measured


def _loss_row(name: str, losses: Dict[int, float], baseline: Dict[int, float]) -> Dict[str, Any]:
    lower = [baseline[seed] - losses[seed] for seed in losses if seed in baseline]
    return {"model": name, "validation loss": _mean(losses.values()), "lower by, mean over seeds": _mean(lower)}


def _widths(study: Dict[str, Any]) -> List[int]:
    return sorted({each["widths"]["head_dim"] for each in study["variants"]})


def _by_seed(study: Dict[str, Any]) -> Dict[int, Dict[int, Dict[str, Any]]]:
    """{seed: {head_dim: run}} of a study with one variant per width."""
    widths = {each["name"]: each["widths"]["head_dim"] for each in study["variants"]}
    found: Dict[int, Dict[int, Dict[str, Any]]] = {}
    for run in study["runs"]:
        found.setdefault(run["seed"], {})[widths[run["variant"]]] = run
    return found


def _last(run: Dict[str, Any], figure: str) -> Optional[float]:
    values = run["heads"].get(figure, {}).get("mean")
    return values[-1] if values else None


def _gradient(run: Optional[Dict[str, Any]]) -> Optional[float]:
    values = [value for value in (run or {"heads": {}})["heads"].get("gradient_norm", {}).get("mean", []) if value]
    return median(values) if values else None


def _ratios(by_seed: Dict[int, Any], width: int, usual: int, of: Callable = _gradient) -> Optional[float]:
    pairs = [(of(runs[width]), of(runs[usual])) for runs in by_seed.values() if width in runs and usual in runs]
    ratios = [one / other for one, other in pairs if one and other]
    return geometric_mean(ratios) if ratios else None


def _mean_of(by_seed: Dict[int, Any], width: int, figure: str) -> Optional[float]:
    return _mean([_last(runs[width], figure) for runs in by_seed.values() if width in runs])


def _most(by_seed: Dict[int, Any], width: int, figure: str) -> Optional[float]:
    values = [
        max(runs[width]["heads"].get(figure, {}).get("most", [0.0])) for runs in by_seed.values() if width in runs
    ]
    return max(values, default=None)


def _mean_loss(by_seed: Dict[int, Any], width: int) -> Optional[float]:
    return _mean([runs[width]["loss"] for runs in by_seed.values() if width in runs])


def _losses_by_rate(study: Dict[str, Any], seed: int, width: int) -> Dict[float, Optional[float]]:
    """{learning rate: last validation loss, None where the run diverged} of one seed and width."""
    wanted = {
        each["name"]: each["changes"]["optimizer.params.lr"]
        for each in study["variants"]
        if each["widths"]["head_dim"] == width
    }
    return {
        wanted[run["variant"]]: run["loss"] for run in study["runs"] if run["seed"] == seed and run["variant"] in wanted
    }


def _best_rate(losses: Dict[float, Optional[float]]) -> Optional[float]:
    finite = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not finite:
        return None
    rates = sorted(losses)
    place = rates.index(min(finite, key=finite.__getitem__))
    around = rates[place - 1 : place + 2] if place else []
    if len(around) < 3 or any(losses[rate] is None for rate in around):
        return None
    return 2 ** _vertex([(math.log2(rate), losses[rate]) for rate in around])


def _vertex(points: Sequence[Tuple[float, float]]) -> float:
    """Where the parabola through three points is lowest; the middle one is the lowest of them."""
    (x0, y0), (x1, y1), (x2, y2) = points
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = (right - left) / (x2 - x0)
    return (x0 + x1) / 2 - left / (2 * curvature) if curvature else x1


def _slope(points: Sequence[Tuple[float, float]]) -> float:
    x_mean, y_mean = (fmean(values) for values in zip(*points, strict=True))
    across = sum((x - x_mean) * (y - y_mean) for x, y in points)
    return across / sum((x - x_mean) ** 2 for x, _ in points)


def _mean(values: Any) -> Optional[float]:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
