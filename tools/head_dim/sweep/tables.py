"""The tables of a report, as (head, rows) of text."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from tools.head_dim.compare import SHORT
from tools.head_dim.sweep.summary import mean

FIGURES = {
    "gradient_norm": "gradient norm",
    "gradient_ratio": "gradient norms, largest / smallest of a layer",
    "score_std": "spread of the scores",
    "score_max": "largest score",
    "entropy_share": "entropy / largest possible",
    "attention_rank": "effective rank of attention",
    "qk_rank": "effective rank of W_q'W_k",
    "qk_rank_share": "effective rank of W_q'W_k / head_dim",
    "ov_rank": "effective rank of W_oW_v",
    "ov_rank_share": "effective rank of W_oW_v / head_dim",
    "first_token": "weight on the first token",
    "output_norm": "output norm",
}
"""Of docs/heads.md, those that a report shows."""


class Table(NamedTuple):
    """What a report shows as one."""

    head: Sequence[str]
    rows: List[List[str]]


def models(variants: List[Dict[str, Any]], baseline: str) -> Table:
    """What each variant is and costs. The baseline is the one that the others are made equal to."""
    reference = next(each for each in variants if each["name"] == baseline)
    widths = list(reference["widths"])
    head = [
        "variant",
        *(SHORT.get(name, name) for name in widths),
        "parameters",
        "FLOPs/token",
        "memory by the cost model",
    ]
    rows = [
        [
            each["name"],
            *(_width(each["widths"][name]) for name in widths),
            _relative(each["parameters"], reference["parameters"], f"{each['parameters']:,}"),
            _relative(each["flops_per_token"], reference["flops_per_token"], f"{each['flops_per_token']:.4g}"),
            f"{each['memory_estimate_bytes'] / 2**20:.0f} MiB",
        ]
        for each in variants
    ]
    return Table(head, rows)


def ranking(summary: Dict[str, Any]) -> Table:
    """Best first."""
    baseline = summary["study"]["baseline"]
    head = ["", "variant", "validation loss", "95 % interval", f"difference to {baseline}", "95 % interval", "loss is"]
    rows = []
    for place, row in enumerate(summary["ranking"], 1):
        verdict = row["verdict"] or ("baseline" if row["variant"] == baseline else "-")
        difference = "-" if row["difference"] is None else f"{row['difference']:+.4f}"
        interval, apart = _interval(row["interval"]), _interval(row["difference_interval"], "+")
        rows.append([str(place), row["variant"], f"{row['mean']:.4f}", interval, difference, apart, verdict])
    return Table(head, rows)


def costs(summary: Dict[str, Any]) -> Table:
    """What was measured of speed and memory: means over the seeds."""
    head = ["variant", "tokens/s", "of the baseline's", "peak resident memory", "seconds a run, start-up included"]
    baseline = next(each for each in summary["variants"] if each["name"] == summary["study"]["baseline"])
    reference = mean(baseline["tokens_per_second"])
    rows = []
    for each in summary["variants"]:
        speed, memory, seconds = (mean(each[key]) for key in ("tokens_per_second", "peak_rss_bytes", "seconds"))
        if speed is not None:
            relative = f"{speed / reference:.2f}" if reference else "-"
            rows.append([each["name"], f"{speed:,.0f}", relative, f"{memory / 2**20:.0f} MiB", f"{seconds:.0f}"])
    return Table(head, rows)


def heads(summary: Dict[str, Any]) -> Optional[Table]:
    """Figures of the last look, means over layers, heads and seeds; None if nothing looked."""
    looked = [each for each in summary["variants"] if each["heads"]["figures"]]
    names = [name for name in FIGURES if any(name in each["heads"]["figures"] for each in looked)]
    rows = [
        [FIGURES[name], *(_figure(mean(each["heads"]["figures"].get(name, ()))) for each in looked)] for name in names
    ]
    return Table(["figure", *(each["name"] for each in looked)], rows) if rows else None


def findings(summary: Dict[str, Any]) -> Optional[Table]:
    """Rules of the checklist, and in how many runs of each variant some head breaks them; None if none does."""
    looked = [each for each in summary["variants"] if each["heads"]["runs"]]
    rules = list(dict.fromkeys(rule for each in looked for rule in each["heads"]["findings"]))
    rows = [
        [rule, *(f"{each['heads']['findings'].get(rule, 0)} of {each['heads']['runs']}" for each in looked)]
        for rule in rules
    ]
    return Table(["rule", *(each["name"] for each in looked)], rows) if rows else None


def _width(value: Any) -> str:
    values = sorted(_numbers(value))
    return f"{values[0]} to {values[-1]}" if values[0] != values[-1] else str(values[0])


def _numbers(value: Any) -> List[int]:
    """Of all layers and of their groups of heads."""
    return [number for each in value for number in _numbers(each)] if isinstance(value, (list, tuple)) else [value]


def _relative(value: float, reference: float, text: str) -> str:
    return text if value == reference else f"{text} ({value / reference - 1:+.2%})"


def _interval(interval: Optional[Sequence[float]], sign: str = "") -> str:
    return "-" if interval is None else " to ".join(f"{value:{sign}.4f}" for value in interval)


def _figure(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.3g}"
