"""The norm of the whole model's gradient, and clipping by it, where DeepSpeed's own is not the true one.

Without ZeRO, DeepSpeed's function for fp32 counts a replicated parameter (a norm, a bias) only on the first rank of
the pipeline x tensor group, so those of later pipeline stages are missing from its norm, and a tied embedding counts
once per stage that holds it. The one for fp16 and bf16 with a torch optimizer counts the first tensor-parallel rank
only. Those of ZeRO and of its BF16_Optimizer are right, and are left to it.
"""

from typing import Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter

from megatron import mpu

_ROW, _BLOCK = 1 << 12, 1 << 20


class GradientNorm:
    """The global norm of a step's gradient, before clipping, and what clipping by it divides by.

    `group` is the process group that holds one copy of the model (pipeline stages x tensor-parallel ranks). After a
    step whose gradient was not finite, and which changed nothing, `skipped` is true.
    """

    def __init__(self, clip: float, group):
        self._clip = clip
        self._group = group
        self.reset()

    def reset(self) -> None:
        """Forget the last step."""
        self.value: Optional[float] = None
        self.skipped = False

    def measure(self, gradients: Iterable[Tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
        """Set value and skipped from this rank's gradients, each with the parameter of the model that it is of."""
        norm = global_norm((gradient for gradient, parameter in gradients if counts_here(parameter)), self._group)
        self.value = norm.item()
        self.skipped = not torch.isfinite(norm).item()

    def clip(self, optimizer: torch.optim.Optimizer, gradients: List[torch.Tensor]) -> None:
        """Let `optimizer` step by the clipped gradients; `gradients` are those of its parameters."""
        divisor = (self.value + 1e-6) / self._clip if self._clip > 0.0 else 1.0
        if optimizer.defaults.get("fused"):  # its kernel divides on the way
            optimizer.grad_scale = torch.tensor(divisor, device=gradients[0].device) if divisor > 1.0 else None
        elif divisor > 1.0:
            torch._foreach_div_(gradients, divisor)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure and clip before each step of an optimizer of the model's own parameters."""
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer, args, kwargs) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:  # as a sum over replicas would leave it
                parameter.grad = torch.zeros_like(parameter)
        self.measure((parameter.grad, parameter) for parameter in parameters)
        if self.skipped:
            for parameter in parameters:
                parameter.grad = None
        else:
            self.clip(optimizer, [parameter.grad for parameter in parameters])


@torch.no_grad()
def global_norm(gradients: Iterable[torch.Tensor], group) -> torch.Tensor:
    """L2 norm of gradients that are spread over the ranks of `group`, each given on one rank only."""
    squares = [sum_of_squares(gradient) for gradient in gradients]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=mpu.current_device())
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """In fp32, in one pass. torch's norm of a whole tensor adds its squares one after another on a CPU, and is off by
    1e-4 at ten million of them; within a row it is exact enough, and sums are made pairwise."""
    flat = tensor.reshape(-1)
    if flat.is_cpu and flat.numel() > _BLOCK and flat.dtype != torch.float32:  # the fp32 copy stays in the cache
        return torch.stack([sum_of_squares(block) for block in flat.split(_BLOCK)]).sum()
    rest = flat.numel() % _ROW
    rows = flat[: flat.numel() - rest].view(-1, _ROW)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms.square().sum() + flat[flat.numel() - rest :].float().square().sum()


def counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank is the one that counts this parameter, or its own shard of it."""
    if getattr(parameter, "ds_pipe_replicated", False):  # a tied weight that an earlier stage counts
        return False
    return is_model_parallel_parameter(parameter) or mpu.get_model_parallel_rank() == 0
