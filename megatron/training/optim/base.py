"""The part of `step` that all optimizers here share."""

import torch


class PerParameterOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of one parameter needs nothing of the others."""

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict) -> None:
        """Change `parameter` in place by its gradient, the options in `group` and self.state[parameter]."""
        raise NotImplementedError
