"""The results of a study without its single runs' curves: what a report shows, small enough to be kept beside it."""

import math
from collections import Counter
from statistics import fmean
from typing import Any, Dict, List, Optional, Sequence

SUMMARY = "summary.json"
DIGITS = 5
WIDTH_SHARES = {"qk_rank": "qk_rank_share", "ov_rank": "ov_rank_share"}
"""Figures that head_dim bounds, and the names of their quotients by it."""


def summarise(results: Dict[str, Any]) -> Dict[str, Any]:
    """From what `api` describes. Curves: the mean over seeds and the least and the most of them."""
    runs = results["runs"]
    return {
        "study": results["study"],
        "machine": results["machine"],
        "variants": [
            _variant(each, [run for run in runs if run["variant"] == each["name"]]) for each in results["variants"]
        ],
        "ranking": rounded(results["ranking"]),
        "runs": dict(Counter(run["status"] for run in runs)),
        "threads": sorted({run["threads"] for run in runs if run["threads"]}),
        "not_finished": [
            {key: run[key] for key in ("variant", "seed", "status", "error")}
            for run in runs
            if run["status"] != "finished"
        ],
    }


def _variant(variant: Dict[str, Any], runs: List[Dict[str, Any]]) -> Dict[str, Any]:
    kept = ("name", "changes", "widths", "parameters", "flops_per_token", "memory_estimate_bytes")
    started = [run for run in runs if run["train"]["step"]]
    return {
        **{key: variant[key] for key in kept},
        "train": rounded(_curve([run["train"] for run in started])),
        "validation": rounded(_curve([run["validation"] for run in started])),
        "last_validation": {str(run["seed"]): rounded(run["validation"]["loss"][-1]) for run in _finished(runs)},
        "tokens_per_second": [run["tokens_per_second"] for run in _finished(runs)],
        "peak_rss_bytes": [run["peak_rss_bytes"] for run in _finished(runs)],
        "seconds": rounded([run["seconds"] for run in _finished(runs)]),
        "heads": rounded(_heads(_finished(runs))),
    }


def _finished(runs: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [run for run in runs if run["status"] == "finished" and run["validation"]["loss"]]


def _curve(curves: List[Dict[str, Any]]) -> Dict[str, List[float]]:
    """At the steps that every run has, as long as all losses are finite."""
    points = [dict(zip(curve["step"], curve["loss"], strict=True)) for curve in curves]
    shared = sorted(set.intersection(*map(set, points))) if points else []
    steps = [step for step in shared if all(each[step] is not None for each in points)]
    values = [[each[step] for each in points] for step in steps]
    return {
        "step": steps,
        "mean": [fmean(each) for each in values],
        "low": [min(each) for each in values],
        "high": [max(each) for each in values],
    }


def _heads(runs: List[Dict[str, Any]]) -> Dict[str, Any]:
    """Of the last look: each figure's mean over layers and heads, a value per run; rules broken, in how many runs."""
    last = [run["heads"][-1] for run in runs if run["heads"]]
    figures = [_figures(look) for look in last]
    names = list(dict.fromkeys(name for each in figures for name in each))
    return {
        "iterations": sorted({look["iteration"] for look in last}),
        "figures": {name: [each[name] for each in figures if name in each] for name in names},
        "findings": dict(Counter(finding["rule"] for look in last for finding in look["findings"])),
        "runs": len(last),
    }


def _figures(look: Dict[str, Any]) -> Dict[str, float]:
    values: Dict[str, List[float]] = {}
    for layer in look["layers"]:
        for name, of_heads in layer["figures"].items():
            widths = layer["head_dim"] if isinstance(layer["head_dim"], list) else [layer["head_dim"]] * len(of_heads)
            known = [(value, width) for value, width in zip(of_heads, widths, strict=True) if value is not None]
            values.setdefault(name, []).extend(value for value, _ in known)
            if name in WIDTH_SHARES:
                values.setdefault(WIDTH_SHARES[name], []).extend(value / width for value, width in known)
        gradients = [value for value in layer["figures"].get("gradient_norm", ()) if value]
        if len(gradients) > 1:
            values.setdefault("gradient_ratio", []).append(max(gradients) / min(gradients))
    return {name: fmean(each) for name, each in values.items() if each}


def rounded(value: Any) -> Any:
    """Floats with five digits, in whatever holds them."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def mean(values: Sequence[float]) -> Optional[float]:
    """None of nothing."""
    return fmean(values) if values else None
