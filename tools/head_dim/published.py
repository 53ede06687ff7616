"""Attention geometries of published models, with their sources: data/geometries.json."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from megatron.neox_arguments.equal_widths import by_layer_text, layer_text, layers_by_value
from megatron.neox_arguments.per_layer import layers_text

DATA = Path(__file__).parent / "data" / "geometries.json"
GEOMETRY = ("hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim", "intermediate_size")
"""The keys by which a model is recognised. intermediate_size is Hugging Face's: the width of one MLP branch."""
OTHERS = ("vocab_size", "rope_theta", "partial_rotary", "tie_embeddings")
"""Keys that tell models of one geometry apart."""
NEAR = 4
"""A model is near a published one if this many of the six GEOMETRY keys are equal."""


@dataclass(frozen=True)
class Published:
    """One model. head_dim and num_kv_heads are those of all layers, or of the local ones where `global_head_dim` and
    `global_num_kv_heads` are given for the others: every `global_every`-th layer. `number` has both.

    attention_scale_override, sliding_window, qk_norm: in words. unverified_fields: keys without a source.
    params: None where no class builds the model.
    """

    name: str
    hf_type: str
    hidden_size: int
    num_layers: int
    num_attention_heads: Any
    num_kv_heads: Any
    head_dim: int
    intermediate_size: Any
    vocab_size: int
    qk_norm: str
    rope_theta: Optional[float]
    partial_rotary: Any
    sliding_window: Optional[str]
    attention_scale_override: Optional[str]
    tie_embeddings: bool
    params: Optional[int]
    params_method: Optional[str]
    source: str
    unverified_fields: Tuple[str, ...]
    notes: str
    global_head_dim: Optional[int] = None
    global_num_kv_heads: Optional[int] = None
    global_every: Optional[int] = None
    v_head_dim: Optional[int] = None

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same widths, and values those of keys."""
        return self.global_head_dim is None and self.can_be_held

    @property
    def can_be_held(self) -> bool:
        """Whether a config here can have these widths: head_dim and num_kv_heads may differ from layer to layer, the
        number of heads and the MLP's width may not, and values are as wide as keys."""
        numbers = (getattr(self, key) for key in GEOMETRY)
        return self.v_head_dim in (None, self.head_dim) and all(isinstance(number, int) for number in numbers)

    def number(self, key: str) -> Any:
        """What the model has under a key of GEOMETRY or OTHERS: one value, or a list with one for each layer."""
        others = {"head_dim": self.global_head_dim, "num_kv_heads": self.global_num_kv_heads}.get(key)
        local = getattr(self, key)
        if key == "partial_rotary" and isinstance(local, str):  # "0.25 on global layers"
            local, others = 1.0, float(local.split()[0])
        if others is None:
            return local
        return [local if (layer + 1) % self.global_every else others for layer in range(self.num_layers)]

    @property
    def qk_norm_type(self) -> Optional[str]:
        """`qk_norm` as the setting of that name."""
        return next((kind for word, kind in _QK_NORMS.items() if self.qk_norm.startswith(word)), None)

    @property
    def softmax_scale(self) -> Optional[float]:
        """What scores are multiplied by; None if the source's words say something else."""
        if self.attention_scale_override is None:
            return None if self.v_head_dim or self.global_head_dim else self.head_dim**-0.5
        found = re.match(r"(query_pre_attn_scalar=|scale )(\d+)", self.attention_scale_override)
        if found is None:
            return None
        number = int(found.group(2))
        return float(number) if found.group(1) == "scale " else number**-0.5


_QK_NORMS = {"per-head": "per_head", "full-width": "full_width"}


@functools.cache
def models() -> Tuple[Published, ...]:
    """All rows, in the order of the file."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))["models"]
    return tuple(
        Published(**{key: tuple(value) if key == "unverified_fields" else value for key, value in row.items()})
        for row in rows
    )


def named(name: str) -> Optional[Published]:
    """The model of that name, in any spelling of case."""
    return next((model for model in models() if model.name.lower() == name.lower()), None)


def differences(numbers: Mapping[str, Any], model: Published, keys: Sequence[str] = GEOMETRY) -> List[str]:
    """One line for each key in which `numbers` are not the model's: "num_attention_heads=40: published 64"; and where
    they differ in some layers only, "head_dim=128 (layers 4-5): published 256"."""
    found: List[str] = []
    for key in keys:
        ours, theirs = numbers.get(key), model.number(key)
        if ours is None or _equal(ours, theirs):
            continue
        pairs = _by_layer(ours, theirs)
        if pairs is None:
            found.append(f"{key}={by_layer_text(ours)}: published {by_layer_text(theirs)}")
        else:
            found += [
                f"{key}={layer_text(mine)} ({layers_text(layers)}): published {layer_text(published)}"
                for (mine, published), layers in layers_by_value(pairs).items()
                if not _equal(mine, published)
            ]
    return found


def _by_layer(ours: Any, theirs: Any) -> Optional[List[Tuple[Any, Any]]]:
    """Both values of each layer, if one of the two has a list and the other none or one as long."""
    lengths = {len(value) for value in (ours, theirs) if isinstance(value, list)}
    if len(lengths) != 1:
        return None
    layers = lengths.pop()
    both = (value if isinstance(value, list) else [value] * layers for value in (ours, theirs))
    return list(zip(*both, strict=True))


def closest(numbers: Mapping[str, Any]) -> Optional[Published]:
    """The published model with the most equal GEOMETRY keys, then OTHERS; None if fewer than NEAR are equal."""
    ranked = max(models(), key=lambda model: (_equals(numbers, model, GEOMETRY), _equals(numbers, model, OTHERS)))
    return ranked if _equals(numbers, ranked, GEOMETRY) >= NEAR else None


def _equals(numbers: Mapping[str, Any], model: Published, keys: Sequence[str]) -> int:
    return sum(numbers.get(key) is not None and _equal(numbers[key], model.number(key)) for key in keys)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) <= 1e-3 * abs(other)  # partial rotary factors are rounded
    if isinstance(one, list) and isinstance(other, list) and len(one) != len(other):
        return set(one) == set(other)  # num_layers is another key
    return one == other
