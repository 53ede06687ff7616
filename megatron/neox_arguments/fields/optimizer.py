"""What is derived from the optimizer and ZeRO blocks."""

from dataclasses import dataclass
from typing import List, Literal, Optional, Union


@dataclass
class NeoXArgsOptimizer:
    """Copies of values inside `optimizer` and `zero_optimization`, for code that wants them flat."""

    optimizer_type: Literal["adam", "onebitadam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "sgd", "lion"] = (
        "adam"
    )
    """Taken from `optimizer.type`. adam is AdamW (decoupled weight decay); cpu_adam is DeepSpeed's for offloaded states
    and compiles itself; cpu_torch_adam is torch's on the CPU; sm3, madgrad_wd, sgd and lion as
    published. onebitadam is refused: DeepSpeed 0.19 no longer has it."""

    use_bnb_optimizer: bool = False
    """Adam with 8-bit states of bitsandbytes. Refused unless false: not built."""

    zero_stage: Optional[Union[int, List[int], Literal["all"]]] = None
    """Taken from `zero_optimization.stage`."""

    zero_reduce_scatter: Optional[bool] = None
    """Taken from `zero_optimization.reduce_scatter`: average gradients by reduce-scatter instead of all-reduce."""

    zero_contiguous_gradients: Optional[bool] = None
    """Taken from `zero_optimization.contiguous_gradients`: copy gradients into one buffer as they appear."""

    zero_reduce_bucket_size: Optional[int] = None
    """Taken from `zero_optimization.reduce_bucket_size`: elements reduced at a time."""

    zero_allgather_bucket_size: Optional[int] = None
    """Taken from `zero_optimization.allgather_bucket_size`: elements gathered at a time."""

    lr: Optional[float] = None
    """Taken from `optimizer.params.lr`: the peak learning rate."""
