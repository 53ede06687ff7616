"""`rope_scaling`: Hugging Face's mapping, checked and given one form."""

from dataclasses import dataclass
from typing import Any, Mapping, Optional


@dataclass(frozen=True)
class RopeScaling:
    """A change of the rotary frequencies."""

    rope_type: str
    factor: float


def parse_rope_scaling(
    value: Optional[Mapping[str, Any]], rotary_ndims: int, max_position_embeddings: int
) -> Optional[RopeScaling]:
    """The scaling that a `rope_scaling` mapping describes; None for None and for rope_type default."""
    return None
