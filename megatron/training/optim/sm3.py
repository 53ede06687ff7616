"""SM3-II (Anil et al. 2019, arXiv:1901.11150): adaptive rates whose memory is one vector per tensor axis."""

import torch

from megatron.training.optim.base import PerParameterOptimizer


class SM3(PerParameterOptimizer):
    """For a tensor of shape (n1, n2, ...) the accumulators have n1 + n2 + ... numbers instead of n1 n2 ....

    nu = min over axes of the axis accumulators + g^2;  w -= lr g / sqrt(nu + eps);  accumulator of an axis = max of
    nu over all other axes. `beta` > 0 replaces the sum by beta * min + (1 - beta) g^2 and keeps the running maximum;
    `momentum` > 0 averages the update. There is no weight decay. DeepSpeed's ZeRO and fp16/bf16 master copies hand
    an optimizer flat vectors, for which SM3 is Adagrad: right, but without the saving.
    """

    def __init__(self, params, lr: float = 0.1, momentum: float = 0.0, beta: float = 0.0, eps: float = 1e-30):
        super().__init__(params, dict(lr=lr, momentum=momentum, beta=beta, eps=eps))

    def _update(self, parameter: torch.Tensor, group: dict) -> None:
        gradient, beta, momentum = parameter.grad, group["beta"], group["momentum"]
        state = self.state[parameter]
        axes = range(max(1, gradient.dim()))
        if not state:
            for axis in axes:
                state[f"accumulator_{axis}"] = torch.zeros_like(_max_except(gradient, axis))
            if momentum > 0.0:
                state["momentum_buffer"] = torch.zeros_like(gradient)
        nu = state["accumulator_0"].expand_as(gradient).clone()
        for axis in axes:
            nu = torch.minimum(nu, state[f"accumulator_{axis}"])
        nu = nu * beta if beta > 0.0 else nu
        nu = nu.addcmul(gradient, gradient, value=1.0 - beta)
        for axis in axes:
            largest = _max_except(nu, axis)
            accumulator = state[f"accumulator_{axis}"]
            accumulator.copy_(torch.maximum(accumulator, largest) if beta > 0.0 else largest)
        update = gradient * (nu + group["eps"]).rsqrt()
        if momentum > 0.0:
            update = state["momentum_buffer"].lerp_(update, 1.0 - momentum)
        parameter.add_(update, alpha=-group["lr"])


def _max_except(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Largest value over every axis but one, kept broadcastable."""
    others = [other for other in range(tensor.dim()) if other != axis]
    return tensor.amax(dim=others, keepdim=True) if others else tensor.clone()
