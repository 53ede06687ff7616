"""Per-parameter figures that the log_* arguments ask for. Norms are of whole parameters, gathered over the ranks."""

import math
from typing import Dict, List, Tuple

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

from megatron.training.gradients import counts_here

Sums = Dict[str, List[float]]
"""Figure -> [sum, count]; summed over the ranks that hold parts of a parameter."""


class Diagnostics:
    """Computes the figures of what is trained between the backward pass and the update of a logged step.

    log_grad_norm, log_param_norm: L2 norms; log_grad_pct_zeros: percentage of gradient entries that are exactly 0;
    log_optimizer_states: L2 norm of each kind of optimizer state, over rank 0's share of it. `take()` returns them,
    on rank 0, as {name: number}. Costs a pass over all parameters, only when the next step will be logged.
    """

    def __init__(self, neox_args, engine):
        self._args = neox_args
        self._engine = engine
        self._scalars: Dict[str, float] = {}
        self._wanted = False
        self.enabled = (
            neox_args.log_grad_norm
            or neox_args.log_param_norm
            or neox_args.log_grad_pct_zeros
            or neox_args.log_optimizer_states
        )
        if self.enabled:
            # The one place that both of DeepSpeed's engines pass between the last backward and the update.
            self._take_model_step = engine._take_model_step
            engine._take_model_step = self._before_update

    def want(self, iteration: int) -> None:
        """Say which step comes next; figures are computed for logged steps only."""
        last = iteration == self._args.train_iters
        self._wanted = self.enabled and (iteration % self._args.log_interval == 0 or last)

    def take(self) -> Dict[str, float]:
        """The figures of the last step, {} if it is not a logged one; only once."""
        scalars, self._scalars = self._scalars, {}
        return scalars

    def _before_update(self, *args, **kwargs):
        sums = self._local_sums() if self._wanted else {}
        result = self._take_model_step(*args, **kwargs)
        if self._wanted:
            self._scalars = _figures(_gather(sums, self._engine))
            if self._args.log_optimizer_states:
                self._scalars.update(_state_norms(self._engine.basic_optimizer))
        return result

    @torch.no_grad()
    def _local_sums(self) -> Sums:
        sums: Sums = {}
        for name, parameter in self._engine.module.named_parameters():
            for figure, value in self._of(name, parameter):
                if counts_here(parameter):
                    sums[figure] = value
        return sums

    def _of(self, name: str, parameter: torch.nn.Parameter):
        if not parameter.requires_grad:
            return
        if self._args.log_param_norm:
            whole = safe_get_full_fp32_param(parameter) if hasattr(parameter, "ds_id") else parameter
            yield f"parameter_norms/{name}", _squares(whole)
        if not (self._args.log_grad_norm or self._args.log_grad_pct_zeros):
            return
        gradient = parameter.grad if parameter.grad is not None else safe_get_full_grad(parameter)
        if gradient is None:
            return
        if self._args.log_grad_norm:
            yield f"gradient_norms/{name}", _squares(gradient)
        if self._args.log_grad_pct_zeros:
            yield f"pct_grad_zeros/{name}", [(gradient == 0).sum().item(), gradient.numel()]


def _squares(tensor: torch.Tensor) -> List[float]:
    return [tensor.float().square().sum().item(), tensor.numel()]


def _gather(sums: Sums, engine) -> Sums:
    """Add up the parts of parameters that are split over ranks; the result is complete on rank 0."""
    group = engine.mpu.get_model_parallel_group() if engine.mpu is not None else None
    if group is None or dist.get_world_size(group) == 1:
        return sums
    parts: List[Sums] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, sums, group=group)
    total: Sums = {}
    for part in parts:
        for figure, (value, count) in part.items():
            before = total.get(figure, [0.0, 0])
            total[figure] = [before[0] + value, before[1] + count]
    return total


def _figures(sums: Sums) -> Dict[str, float]:
    return {figure: _figure(figure, *pair) for figure, pair in sums.items()}


def _figure(name: str, value: float, count: int) -> float:
    return 100.0 * value / count if name.startswith("pct_grad_zeros/") else math.sqrt(value)


def _state_norms(optimizer: torch.optim.Optimizer) -> Dict[str, float]:
    squares: Dict[str, float] = {}
    for key, value in _state_tensors(optimizer):
        squares[key] = squares.get(key, 0.0) + value.float().square().sum().item()
    return {f"optimizer_state_norms/{key}": math.sqrt(value) for key, value in squares.items()}


def _state_tensors(optimizer: torch.optim.Optimizer) -> List[Tuple[str, torch.Tensor]]:
    return [
        (key, value)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    ]
