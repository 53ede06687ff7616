"""The cases of the attention grid: geometries, features, weights and inputs, and what the reference makes of them."""

from functools import lru_cache
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

import torch

from tests.helpers.attention_reference import AttentionFunction, value_and_gradients

BATCH, TOKENS = 2, 12
LONG = 132
"""Tokens of the one text that is longer than a block of the chunked kernel on the CPU; of one row."""
BASE = 700.0
"""rotary_emb_base, not the default."""
EPS = 1e-3
"""Of the norms: large enough that leaving it out is seen."""


def _geometry(hidden, heads, kv_heads, head_dim, rotary_pct):
    numbers = dict(hidden_size=hidden, num_attention_heads=heads, head_dim=head_dim, rotary_pct=rotary_pct)
    return numbers if kv_heads == heads else dict(numbers, num_kv_heads=kv_heads)


GEOMETRIES = {
    f"{h} / {n} / {m} / {d} / {pct:g}": _geometry(h, n, m, d, pct)
    for h, n, m, d, pct in [
        (56, 3, 3, 8, 1.0),  # narrow, multi-head, no even split
        (88, 12, 4, 10, 1.0),  # splits over 4
        (40, 5, 1, 12, 0.5),  # multi-query, non-divisible
        (64, 4, 4, 16, 0.25),  # head_dim is the quotient
        (80, 6, 2, 24, 0.25),  # wide, non-divisible
        (160, 4, 2, 24, 0.5),  # narrow, 2 kv heads on 4 ranks
        (72, 4, 4, 64, 0.25),
        (52, 6, 3, 64, 0.5),
        (44, 4, 1, 80, 0.25),  # multi-query on 4 ranks
        (104, 8, 2, 128, 1.0),  # 2 kv heads on 4 ranks
        (60, 4, 2, 256, 0.25),
        (48, 2, 2, 320, 0.5),
        (100, 3, 1, 320, 1.0),
    ]
}
"""hidden_size / num_attention_heads / num_kv_heads / head_dim / rotary_pct."""


class Feature(NamedTuple):
    """Settings beside the geometry; cache: fed in PIECES and without gradients; tokens of the text."""

    settings: Dict[str, Any]
    cache: bool = False
    tokens: int = TOKENS


FEATURES = {
    "causal": Feature({}),
    "bf16": Feature(dict(precision="bfloat16")),
    f"{LONG} tokens": Feature({}, tokens=LONG),
    "softmax_scale": Feature(dict(softmax_scale=0.31)),
    "window": Feature(dict(sliding_window_width=3)),
    "softcap": Feature(dict(attn_logit_softcap=0.7)),
    "joint norm": Feature(dict(use_qk_layernorm=True, norm="rmsnorm", rms_norm_epsilon=EPS)),
    "per_head norm": Feature(dict(qk_norm_type="per_head", norm="rmsnorm", rms_norm_epsilon=EPS)),
    "full_width norm": Feature(dict(qk_norm_type="full_width", norm="layernorm", layernorm_epsilon=EPS)),
    "alibi": Feature(dict(pos_emb="alibi")),
    "rpe": Feature(dict(pos_emb="rpe", rpe_num_buckets=8, rpe_max_distance=10)),
    "sequence parallel": Feature(dict(sequence_parallel=True)),
    "cache": Feature({}, cache=True),
    "cache, window": Feature(dict(sliding_window_width=3), cache=True),
    "cache, joint norm": Feature(dict(use_qk_layernorm=True, norm="rmsnorm", rms_norm_epsilon=EPS), cache=True),
    "cache, alibi, window": Feature(dict(pos_emb="alibi", sliding_window_width=3), cache=True),
    "fp8 cache": Feature(dict(kv_cache_dtype="fp8_e4m3"), cache=True),
    "int8 cache, window": Feature(dict(kv_cache_dtype="int8", sliding_window_width=3), cache=True),
}


def geometries(ranks: int = 1) -> Iterator[str]:
    """The names of those geometries that split over `ranks`: by query heads, and by kv heads or the other way round."""
    for name, numbers in GEOMETRIES.items():
        heads = numbers["num_attention_heads"]
        kv_heads = numbers.get("num_kv_heads", heads)
        if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
            yield name


class Case(NamedTuple):
    """One geometry with one feature: whole weights by native name, inputs, and the truth."""

    function: AttentionFunction
    weights: Dict[str, torch.Tensor]
    hidden: torch.Tensor
    upstream: torch.Tensor
    output: Optional[torch.Tensor]
    gradients: Dict[str, torch.Tensor]
    cache: bool


@lru_cache(maxsize=2)
def case_of(geometry: str, feature: str) -> Case:
    """The same in every process."""
    numbers, wanted = GEOMETRIES[geometry], FEATURES[feature]
    function = _function(numbers, wanted.settings)
    dtype = torch.bfloat16 if feature == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(sum(map(ord, geometry + feature)))
    shapes = _shapes(numbers["hidden_size"], function)
    weights = {name: _weight(name, shape, generator).to(dtype) for name, shape in shapes.items()}
    size = (wanted.tokens, 1 if wanted.tokens == LONG else BATCH, numbers["hidden_size"])
    hidden, upstream = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    upstream = upstream / 4
    truth = None, {}
    if not wanted.settings.get("kv_cache_dtype"):  # whose truth starts from the keys and values that were rounded
        truth = value_and_gradients(weights, hidden, function, upstream)
    return Case(function, weights, hidden, upstream, *truth, wanted.cache)


def _function(numbers: Dict[str, Any], settings: Dict[str, Any]) -> AttentionFunction:
    heads, width = numbers["num_attention_heads"], numbers["head_dim"]
    positions = settings.get("pos_emb")
    return AttentionFunction(
        heads,
        numbers.get("num_kv_heads", heads),
        width,
        rotary_ndims=0 if positions else int(width * numbers["rotary_pct"]),
        base=BASE,
        scale=settings.get("softmax_scale"),
        window=settings.get("sliding_window_width"),
        softcap=settings.get("attn_logit_softcap"),
        qk_norm="joint" if settings.get("use_qk_layernorm") else settings.get("qk_norm_type"),
        norm=settings.get("norm", "layernorm"),
        eps=EPS,
        positions=positions,
        rpe_num_buckets=settings.get("rpe_num_buckets", 32),
        rpe_max_distance=settings.get("rpe_max_distance", 128),
    )


def _shapes(hidden: int, function: AttentionFunction) -> Dict[str, Tuple[int, ...]]:
    """Whole shapes by native name."""
    n, m, d = function.heads, function.kv_heads, function.head_dim
    rows = (n + 2 * m) * d
    shapes = {"query_key_value.weight": (rows, hidden), "query_key_value.bias": (rows,)}
    shapes.update({"dense.weight": (hidden, n * d), "dense.bias": (hidden,)})
    parts = ("scale",) if function.norm == "rmsnorm" else ("weight", "bias")
    norms = {
        None: {},
        "joint": {"qk_layernorm": (n, d)},
        "per_head": {"q_layernorm": (d,), "k_layernorm": (d,)},
        "full_width": {"q_layernorm": (n * d,), "k_layernorm": (m * d,)},
    }[function.qk_norm]
    shapes.update({f"{name}.{part}": shape for name, shape in norms.items() for part in parts})
    return {**shapes, "rpe.weight": (function.rpe_num_buckets, n)} if function.positions == "rpe" else shapes


def _weight(name: str, shape: Tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values under which outputs are of order one and scores differ."""
    values = torch.randn(shape, generator=generator)
    if len(shape) == 2 and "norm" not in name and name != "rpe.weight":
        return values * shape[1] ** -0.5
    return values * 0.2 + (1.0 if name.endswith(("norm.scale", "norm.weight")) else 0.0)
