"""bfloat16 without ZeRO: the step of the fp32 weights that the bfloat16 ones are rounded from."""

from typing import Any, Dict, Iterator, List, Tuple

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from megatron.training.gradients import GradientNorm

Piece = List[Tuple[torch.Tensor, torch.nn.Parameter]]
"""fp32 weights and the model's, in pairs."""

_PIECE = 1 << 22
"""Numbers that are stepped together: few enough for a CPU's caches, enough to keep a GPU busy."""


class MasterWeightOptimizer(FP16_UnfusedOptimizer):
    """DeepSpeed's optimizer with a cheaper step; its state, and so its checkpoints, are the same.

    DeepSpeed reads all gradients three times before it steps (overflow, norm, clipping) and holds a second gradient of
    every parameter, in fp32. Here they are read once for the norm, and fp32 gradients exist for one piece at a time.
    """

    gradient_norm: GradientNorm

    @classmethod
    def take_over(cls, optimizer: FP16_UnfusedOptimizer, gradient_norm: GradientNorm) -> None:
        """Make a fresh `optimizer` one of this class."""
        optimizer.__class__ = cls
        optimizer.gradient_norm = gradient_norm
        # DeepSpeed has made a step on zero gradients to allocate the state: that is not the same as no step, because
        # Adam counts it in its bias correction and weights have decayed.
        optimizer.optimizer.state.clear()
        optimizer.refresh_fp32_params()

    @torch.no_grad()
    def step(self, closure=None) -> bool:
        """Step, or drop the gradient if it is not finite; returns whether it was dropped."""
        parameters = (parameter for group in self.fp16_groups for parameter in group)
        self.gradient_norm.measure((p.grad, p) for p in parameters if p.grad is not None)
        self.overflow = self.gradient_norm.skipped
        if self.overflow:
            return self._skip_invalid_grad_norm()
        self._global_grad_norm = self.gradient_norm.value
        self._update_scale(False)
        for group, masters, parameters in zip(self.param_groups, self.fp32_groups, self.fp16_groups, strict=True):
            for piece in _pieces(list(zip(masters, parameters, strict=True))):
                self._step_piece(group, piece)
        return self.overflow

    def _step_piece(self, group: Dict[str, Any], piece: Piece) -> None:
        masters, parameters = map(list, zip(*piece, strict=True))
        for master, parameter in piece:
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self.gradient_norm.clip(self.optimizer, [master.grad for master in masters])
        self._step_only(group, masters)
        for master in masters:
            master.grad = None
        torch._foreach_copy_(parameters, masters)

    def _step_only(self, group: Dict[str, Any], masters: List[torch.Tensor]) -> None:
        groups, whole = self.optimizer.param_groups, group["params"]
        self.optimizer.param_groups, group["params"] = [group], masters
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups, group["params"] = groups, whole


def _pieces(pairs: Piece) -> Iterator[Piece]:
    piece, size = [], 0
    for pair in pairs:
        piece.append(pair)
        size += pair[0].numel()
        if size >= _PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
