"""The norm of the whole model's gradient, and clipping by it, where DeepSpeed's own is not the true one.

Without ZeRO, DeepSpeed's function for fp32 counts a replicated parameter (a norm, a bias) only on the first rank of
the pipeline x tensor group, so those of later pipeline stages are missing from its norm, and a tied embedding counts
once per stage that holds it. The one for fp16 and bf16 with a torch optimizer counts the first tensor-parallel rank
only. Those of ZeRO and of its BF16_Optimizer are right, and are left to it.
"""

from typing import Dict, Iterable, Optional

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter

from megatron import mpu


class GradientNorm:
    """A step hook of a torch optimizer that computes the global norm, clips by it and keeps it.

    A gradient that is not finite is dropped instead, so that the step changes nothing: `skipped` says so. `group` is
    the process group that holds one copy of the model (pipeline stages x tensor-parallel ranks). `model_parameters`
    gives, where the optimizer steps fp32 copies, the id of a copy -> the parameter of the model.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip: float,
        group,
        model_parameters: Optional[Dict[int, torch.nn.Parameter]] = None,
    ):
        self._clip = clip
        self._group = group
        self._model_parameters = model_parameters or {}
        self.reset()
        optimizer.register_step_pre_hook(self._before_step)

    def reset(self) -> None:
        """Forget the last step."""
        self.value: Optional[float] = None
        self.skipped = False

    def _before_step(self, optimizer, args, kwargs) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        counted = [p.grad for p in parameters if counts_here(self._model_parameters.get(id(p), p))]
        norm = global_norm(counted, self._group)
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
def global_norm(gradients: Iterable[torch.Tensor], group) -> torch.Tensor:
    """L2 norm of gradients that are spread over the ranks of `group`, each given on one rank only."""
    squares = [gradient.float().square().sum() for gradient in gradients]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=mpu.current_device())
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank is the one that counts this parameter, or its own shard of it."""
    if getattr(parameter, "ds_pipe_replicated", False):  # a tied weight that an earlier stage counts
        return False
    return is_model_parallel_parameter(parameter) or mpu.get_model_parallel_rank() == 0
