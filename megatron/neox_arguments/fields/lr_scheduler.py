"""The learning-rate schedule."""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class NeoXArgsLRScheduler:
    """Warm-up and decay of the learning rate; its peak is `optimizer.params.lr`."""

    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = "linear"
    """Shape after the warm-up, over n decay iterations: linear goes to 0, cosine to `min_lr`, exponential to half the
    peak, constant stays. Never below `min_lr`."""

    lr_decay_iters: Optional[int] = None
    """Iterations from the first one to the end of the decay, warm-up included. Null: `lr_decay_fraction` of the run,
    else the whole run."""

    lr_decay_fraction: Optional[float] = None
    """The same as a share of `train_iters`, rounded down. Excludes `lr_decay_iters`."""

    min_lr: float = 0.0
    """Floor of the learning rate after the warm-up. Must not exceed the peak."""

    warmup: float = 0.01
    """Share of the decay iterations during which the learning rate rises linearly to its peak."""

    override_lr_scheduler: bool = False
    """On resuming use the schedule of this configuration instead of the one in the checkpoint. Cannot be combined with
    `use_checkpoint_lr_scheduler`."""

    use_checkpoint_lr_scheduler: bool = False
    """On resuming take the schedule from the checkpoint even where this configuration differs. With both switches off a
    difference is an error."""
