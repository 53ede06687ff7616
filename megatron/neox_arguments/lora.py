"""`lora`: which projections get low-rank adapters, and of which rank."""

import math
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Optional, Tuple

from megatron.errors import ConfigError
from megatron.neox_arguments.loading import nearest

TARGETS = ("query_key_value", "dense", "linear1", "linear2")
"""Our names: the fused QKV and the output projection of attention, the first and second projection of the MLP."""

_DEFAULT_TARGETS = ("query_key_value", "dense")
_KEYS = ("rank", "alpha", "dropout", "targets")
_PARTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "query_key_value"),
    "o_proj": "dense",
    **dict.fromkeys(("up_proj", "gate_proj"), "linear1"),
    "down_proj": "linear2",
}
"""PEFT's names for Llama's projections, of which some are parts of ours."""


@dataclass(frozen=True)
class LoRASettings:
    """Low-rank adapters (Hu et al. 2021): each target computes W x + alpha / rank * B A dropout(x)."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: Tuple[str, ...] = _DEFAULT_TARGETS

    @property
    def scale(self) -> float:
        """alpha / rank, the factor on what the adapters add."""
        return self.alpha / self.rank

    def stamp(self) -> Mapping[str, Any]:
        """What a checkpoint records: dropout belongs to a run and not to the function."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)}


def lora_settings(args: Any) -> Optional[LoRASettings]:
    """The adapters that arguments ask for; None for none. Raises ConfigError with every problem of the mapping."""
    value = args.lora
    if value is None:
        return None
    problems = [*_problems(value)]
    if problems:
        raise ConfigError([f"lora={value}: {problem}" for problem in problems])
    targets = value.get("targets") or _DEFAULT_TARGETS
    alpha = value.get("alpha")
    return LoRASettings(
        rank=value["rank"],
        alpha=float(value["rank"] if alpha is None else alpha),
        dropout=float(value.get("dropout") or 0.0),
        targets=tuple(target for target in TARGETS if target in targets),
    )


def _problems(value: Mapping[str, Any]) -> Iterator[str]:
    for key in value:
        if key not in _KEYS:
            close = nearest(str(key), _KEYS)
            yield f"{key} is none of {', '.join(_KEYS)}" + (f"; did you mean {close}?" if close else "; remove it")
    rank, alpha, dropout = (value.get(key) for key in ("rank", "alpha", "dropout"))
    if rank is None:
        yield "rank is not set; give the width of the adapters, for example 8"
    elif type(rank) is not int or rank <= 0:
        yield f"rank={rank!r} must be a positive whole number"
    if alpha is not None and not (_is_number(alpha) and alpha > 0):
        yield f"alpha={alpha!r} must be a number greater than 0; null is rank, which makes the factor 1"
    if dropout is not None and not (_is_number(dropout) and 0 <= dropout < 1):
        yield f"dropout={dropout!r} must be a number from 0 up to, but not including, 1"
    yield from _target_problems(value.get("targets"))


def _target_problems(targets: Any) -> Iterator[str]:
    if targets is None:
        return
    if not isinstance(targets, (list, tuple)) or not targets:
        yield f"targets={targets!r} must be a list of some of {', '.join(TARGETS)}"
        return
    for target in targets:
        if target in _PARTS:
            yield f"targets: {target} is {_PARTS[target]} here, or a part of it; write {_PARTS[target]}"
        elif target not in TARGETS:
            yield f"targets: {target!r} is none of {', '.join(TARGETS)}"


def _is_number(value: Any) -> bool:
    """bool is an int in Python but never a number of a config."""
    return type(value) in (int, float) and math.isfinite(value)
