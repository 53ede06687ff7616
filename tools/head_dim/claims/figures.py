"""What the verdicts need of a sweep's results: a few numbers for each run, small enough to be kept with the page."""

from statistics import fmean, geometric_mean, median
from typing import Any, Dict, List, Optional

DIGITS = 5
LOOKED_AT = {"attention_rank": fmean, "score_rank": fmean, "gradient_norm": geometric_mean}
"""Figures of heads, and how they are averaged over the heads of all layers."""


def figures_of(results: Dict[str, Any]) -> Dict[str, Any]:
    """{name, about, seeds, settings, variants: [{name, changes, widths, parameters}],
    runs: [{variant, seed, status, loss, grad_norm, first_grad_norm, looks, heads: {figure: {mean, most}}}]}

    A run that did not finish has no figures: None, and no looks. loss: the last validation loss. grad_norm: of the
    whole model, median over the logged steps; first_grad_norm: of the first of them. heads: lists with one number for
    each look, `most` being that of the largest head.
    """
    study = results["study"]
    return {
        "name": study["name"],
        "about": study["about"],
        "seeds": study["seeds"],
        "variants": [
            {key: each[key] for key in ("name", "changes", "widths", "parameters")} for each in results["variants"]
        ],
        "runs": [_run(run) for run in results["runs"]],
    }


def _run(run: Dict[str, Any]) -> Dict[str, Any]:
    finished = run["status"] == "finished"
    losses = run["validation"]["loss"] if finished else []
    norms = [norm for norm in run["train"]["grad_norm"] if norm is not None] if finished else []
    looks = run["heads"] if finished else []
    return {
        "variant": run["variant"],
        "seed": run["seed"],
        "status": run["status"],
        "loss": losses[-1] if losses else None,
        "grad_norm": _short(median(norms)) if norms else None,
        "first_grad_norm": run["train"]["grad_norm"][0] if norms else None,
        "looks": [look["iteration"] for look in looks],
        "heads": {name: _looks(looks, name) for name in LOOKED_AT if looks},
    }


def _looks(looks: List[Dict[str, Any]], name: str) -> Dict[str, List[Optional[float]]]:
    values = [[value for layer in look["layers"] for value in layer["figures"].get(name, ())] for look in looks]
    return {"mean": [_mean(LOOKED_AT[name], each) for each in values], "most": [_mean(max, each) for each in values]}


def _mean(how: Any, values: List[Optional[float]]) -> Optional[float]:
    """None where a number is missing or was not finite."""
    return _short(how(values)) if values and None not in values and min(values) > 0 else None


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
