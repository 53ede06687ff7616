"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class NeoXArgsLRScheduler:
    """TODO: what these arguments are for."""

    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = "linear"
    """TODO."""

    lr_decay_iters: Optional[int] = None
    """TODO."""

    lr_decay_fraction: Optional[float] = None
    """TODO."""

    min_lr: float = 0.0
    """TODO."""

    warmup: float = 0.01
    """TODO."""

    override_lr_scheduler: bool = False
    """TODO."""

    use_checkpoint_lr_scheduler: bool = False
    """TODO."""
