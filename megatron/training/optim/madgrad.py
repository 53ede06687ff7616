"""MADGRAD (Defazio and Jelassi 2021, arXiv:2101.11075, algorithm 1) with decoupled weight decay."""

import torch

from megatron.training.optim.base import PerParameterOptimizer


class MadgradWD(PerParameterOptimizer):
    """Dual averaging with a cube-root denominator; weight decay multiplies the weights, as in AdamW.

    With k steps taken, a = lr sqrt(k + 1):
    s += a g;  v += a g^2;  z = x0 - s / (v^(1/3) + eps);  x = momentum x + (1 - momentum) z,
    where x has been multiplied by (1 - lr weight_decay) first and x0 is the initial weight.
    """

    def __init__(self, params, lr: float = 1e-2, momentum: float = 0.9, weight_decay: float = 0.0, eps: float = 1e-6):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps))

    def _update(self, parameter: torch.Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["grad_sum_sq"] = torch.zeros_like(parameter)
            state["s"] = torch.zeros_like(parameter)
            state["x0"] = parameter.detach().clone()
        gradient = parameter.grad
        scale = group["lr"] * (state["step"] + 1) ** 0.5
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        state["grad_sum_sq"].addcmul_(gradient, gradient, value=scale)
        state["s"].add_(gradient, alpha=scale)
        denominator = state["grad_sum_sq"].pow(1.0 / 3.0).add_(group["eps"])
        target = state["x0"].addcdiv(state["s"], denominator, value=-1.0)
        parameter.mul_(group["momentum"]).add_(target, alpha=1.0 - group["momentum"])
        state["step"] += 1
