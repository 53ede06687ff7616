"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import List, Literal, Optional, Union


@dataclass
class NeoXArgsOptimizer:
    """TODO: what these arguments are for."""

    optimizer_type: Literal["adam", "onebitadam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "sgd", "lion"] = (
        "adam"
    )
    """TODO."""

    use_bnb_optimizer: bool = False
    """TODO."""

    zero_stage: Optional[Union[int, List[int], Literal["all"]]] = None
    """TODO."""

    zero_reduce_scatter: Optional[bool] = None
    """TODO."""

    zero_contiguous_gradients: Optional[bool] = None
    """TODO."""

    zero_reduce_bucket_size: Optional[int] = None
    """TODO."""

    zero_allgather_bucket_size: Optional[int] = None
    """TODO."""

    lr: Optional[float] = None
    """TODO."""
