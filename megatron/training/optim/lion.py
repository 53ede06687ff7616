"""Lion (Chen et al. 2023, arXiv:2302.06675, program 1)."""

import torch

from megatron.training.optim.base import PerParameterOptimizer


class Lion(PerParameterOptimizer):
    """The sign of an interpolated momentum, with decoupled weight decay; one state tensor per parameter.

    update = sign(b1 m + (1 - b1) g);  w -= lr (update + weight_decay w);  m = b2 m + (1 - b2) g
    """

    def __init__(self, params, lr: float = 1e-4, betas=(0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, betas=tuple(betas), weight_decay=weight_decay))

    def _update(self, parameter: torch.Tensor, group: dict) -> None:
        beta1, beta2 = group["betas"]
        gradient = parameter.grad
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum = state["exp_avg"]
        update = torch.lerp(gradient, momentum, beta1).sign_()
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])
        momentum.lerp_(gradient, 1.0 - beta2)
