"""Which parameters decay."""

from typing import Any, Dict, List

import torch

from megatron.model.norms import Norm


def get_params_for_weight_decay_optimization(model: torch.nn.Module, neox_args) -> List[Dict[str, Any]]:
    """Parameter groups for the optimizer: weights decay; norms, biases and what is marked `_no_weight_decay` do not.

    With weight_decay=0 there is one group. A parameter that several modules share is listed once, frozen ones never.
    """
    decayed: Dict[str, Any] = {"params": [], "name": "weight_decay_params"}
    exempt: Dict[str, Any] = {"params": [], "weight_decay": 0.0, "name": "no_weight_decay_params"}
    seen = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            group = decayed if neox_args.weight_decay and _decays(module, name, parameter) else exempt
            group["params"].append(parameter)
    return [group for group in (decayed, exempt) if group["params"]]


def _decays(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> bool:
    return not isinstance(module, Norm) and name != "bias" and not getattr(parameter, "_no_weight_decay", False)
