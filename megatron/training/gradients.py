"""The norm of the whole model's gradient, and clipping by it, where DeepSpeed leaves plain torch optimizers to itself.

DeepSpeed's own function for fp32 without ZeRO counts a replicated parameter (a norm, a bias) only on the first rank of
the pipeline x tensor group, so those of later pipeline stages are missing from its norm, and a tied embedding is
counted once per stage that holds it.
"""

from typing import Iterable, Optional

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter

from megatron import mpu


class GradientNorm:
    """A step hook of a torch optimizer that computes the global norm, clips by it and keeps it.

    A gradient that is not finite is dropped instead, so that the step changes nothing: `skipped` says so. `group` is
    the process group that holds one copy of the model (pipeline stages x tensor-parallel ranks).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float, group):
        self._clip = clip
        self._group = group
        self.value: Optional[float] = None
        self.skipped = False
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer, args, kwargs) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = global_norm(parameters, self._group)
        self.value = norm.item()
        self.skipped = not torch.isfinite(norm).item()
        if self.skipped:
            for parameter in parameters:
                parameter.grad = None
        elif self._clip > 0.0:
            factor = min(1.0, self._clip / (self.value + 1e-6))
            if factor < 1.0:
                torch._foreach_mul_([parameter.grad for parameter in parameters], factor)


@torch.no_grad()
def global_norm(parameters: Iterable[torch.nn.Parameter], group) -> torch.Tensor:
    """L2 norm of the gradients of one copy of the model, summed over `group`; every parameter counts once."""
    squares = [p.grad.float().square().sum() for p in parameters if counts_here(p)]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=mpu.current_device())
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank is the one that counts this parameter, or its own shard of it."""
    if getattr(parameter, "ds_pipe_replicated", False):  # a tied weight that an earlier stage counts
        return False
    return is_model_parallel_parameter(parameter) or mpu.get_model_parallel_rank() == 0
