"""What is unusual about the heads of a model, and what to try. Rules of thumb with their sources, not verdicts."""

import math
from dataclasses import dataclass
from statistics import median
from typing import Callable, Dict, Iterator, List, Tuple

from megatron.head_diagnostics.report import HeadReport, LayerReport

OURS = "a rule of this project, not from a publication"
GRADIENT_RATIO = 3.0
SCORE_MAX = 50.0
ENTROPY_SHARE = 0.05
UNIFORM_SHARE = 0.98
QUIET = 0.05
ALIKE = 0.95
SINK = 0.5
UNUSED_WIDTH = 0.25


@dataclass(frozen=True)
class Finding:
    """where: (layer, head), head -1 for a whole layer. measured: the worst of them. advice: what to try."""

    rule: str
    where: List[Tuple[int, int]]
    measured: str
    source: str
    advice: str

    def __str__(self) -> str:
        return f"{self.rule} ({_places(self.where)}): {self.measured}. Try: {self.advice} [{self.source}]"


def findings(report: HeadReport) -> List[Finding]:
    """Every rule that some head breaks, in the order of RULES."""
    found = (rule(report) for rule in RULES)
    return [finding for finding in found if finding is not None]


def _not_finite(report: HeadReport):
    unfit = {
        (layer.layer, head): value
        for layer in report.layers
        for values in layer.figures.values()
        for head, value in enumerate(values)
        if not math.isfinite(value)
    }
    return _finding(
        "figures are not finite",
        unfit,
        lambda worst: "weights, scores or gradients hold NaN or infinity",
        OURS,
        "nothing for a step of fp16 training that looks for its loss scale; else an earlier checkpoint and a lower lr",
    )


def _gradient_ratio(report: HeadReport):
    ratios = {}
    for layer in report.layers:
        norms = layer.figures.get("gradient_norm")
        if norms:
            ratios[layer.layer, -1] = max(norms) / max(min(norms), 1e-30)
    return _finding(
        "gradient norms of a layer's heads differ by 3 or more",
        {where: ratio for where, ratio in ratios.items() if ratio >= GRADIENT_RATIO},
        lambda worst: f"largest ratio {worst:.1f}",
        "the rule that this ratio stays below 3 is that of an article on head dimension; nobody has shown what breaks",
        "a longer warmup or a lower lr; use_qk_layernorm: true; look whether the loud heads are those of one key/value "
        "head",
    )


def _large_scores(report: HeadReport):
    return _finding(
        "attention logits are large",
        _where(report, "score_max", lambda value, layer: value > SCORE_MAX),
        lambda worst: f"largest magnitude {worst:.0f}, and weights saturate long before",
        "Dehghani et al. 2023 (ViT-22B) saw training diverge as they grew; Wortsman et al. 2023 (small-scale proxies)",
        "use_qk_layernorm: true, attn_logit_softcap, a lower lr, or a smaller softmax_scale",
    )


def _collapsed(report: HeadReport):
    return _finding(
        "attention has collapsed to single tokens",
        _where(report, "entropy_share", lambda value, layer: value < ENTROPY_SHARE),
        lambda worst: f"entropy {worst:.1%} of the largest possible",
        "Zhai et al. 2023 (sigma reparam): low entropy goes with instability; heads that copy one token are also so",
        "use_qk_layernorm: true, a smaller init (init_method), attention_dropout",
        worst=min,
    )


def _uniform(report: HeadReport):
    return _finding(
        "attention is uniform: the head only averages",
        _where(report, "entropy_share", lambda value, layer: value > UNIFORM_SHARE),
        lambda worst: f"entropy {worst:.1%} of the largest possible",
        OURS,
        "nothing before some hundred steps: every head starts so; later a larger init or lr, or fewer, wider heads",
    )


def _quiet(report: HeadReport):
    def is_quiet(value: float, layer: LayerReport) -> bool:
        return value < QUIET * median(layer.figures["output_norm"])

    return _finding(
        "heads add next to nothing to the residual stream",
        _where(report, "output_norm", is_quiet),
        lambda worst: f"output norm down to {worst:.2g}, under {QUIET:.0%} of the layer's median",
        "Michel et al. 2019: many heads can be taken away without loss",
        "fewer heads, or narrower ones (tools/head_dim plan --sweep)",
        worst=min,
    )


def _duplicates(report: HeadReport):
    alike = {
        (layer.layer, head): cosine
        for layer in report.layers
        for first, second, cosine in layer.alike
        if cosine > ALIKE
        for head in (first, second)
    }
    return _finding(
        "heads attend alike",
        alike,
        lambda worst: f"cosine of their weights up to {worst:.3f}",
        OURS,
        "fewer heads; with num_kv_heads the query heads of one key head may simply not have parted yet",
    )


def _unused_width(report: HeadReport):
    ranks = {
        (layer.layer, head): rank
        for layer in report.layers
        for head, rank in enumerate(layer.figures.get("qk_rank", ()))
        if rank < UNUSED_WIDTH * layer.width_of(head)
    }
    return _finding(
        "heads use little of their width to choose tokens",
        ranks,
        lambda worst: f"effective rank of W_q^T W_k down to {worst:.1f}",
        "Bhojanapalli et al. 2020: head_dim bounds the rank of the scores; how little of it suffices is not published",
        "a smaller head_dim, or adapters of that rank when tuning",
        worst=min,
    )


def _sinks(report: HeadReport):
    return _finding(
        "heads rest on the first token",
        _where(report, "first_token", lambda value, layer: value > SINK),
        lambda worst: f"up to {worst:.0%} of the weight",
        "Xiao et al. 2023 (attention sinks): usual in trained models",
        "nothing; do not cut the first tokens from a cache",
    )


RULES: List[Callable] = [
    _not_finite,
    _gradient_ratio,
    _large_scores,
    _collapsed,
    _uniform,
    _quiet,
    _duplicates,
    _unused_width,
    _sinks,
]


def _where(report: HeadReport, name: str, breaks: Callable) -> Dict[Tuple[int, int], float]:
    return dict(_breaking(report, name, breaks))


def _breaking(report: HeadReport, name: str, breaks: Callable) -> Iterator[Tuple[Tuple[int, int], float]]:
    for layer in report.layers:
        for head, value in enumerate(layer.figures.get(name, ())):
            if breaks(value, layer):
                yield (layer.layer, head), value


def _finding(rule: str, breaking: Dict, tell: Callable, source: str, advice: str, worst: Callable = max):
    if not breaking:
        return None
    return Finding(rule, sorted(breaking), tell(worst(breaking.values())), source, advice)


def _places(where: List[Tuple[int, int]], shown: int = 6) -> str:
    places = [f"layer {layer}" if head < 0 else f"layer {layer} head {head}" for layer, head in where]
    rest = f" and {len(places) - shown} more" if len(places) > shown else ""
    return ", ".join(places[:shown]) + rest
