"""The optimizer a config names: `optimizer: {"type": ..., "params": {...}}` plus the separate `weight_decay`."""

import inspect
from typing import Any, Callable, Dict, List

import torch

from megatron.errors import BackendError, ConfigError
from megatron.initialize import print_rank_0
from megatron.training.optim import SM3, Lion, MadgradWD


def get_optimizer(neox_args, param_groups: List[Dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer over `param_groups` (dicts with "params" and, where it differs, "weight_decay").

    adam, cpu_adam and cpu_torch_adam decay weights decoupled from the gradient (AdamW, as apex's and DeepSpeed's
    Adam do by default).

    Raises ConfigError for an unknown type or parameter, BackendError if the library behind it cannot be used.
    """
    kind = neox_args.optimizer_type.lower()
    if kind not in _BUILDERS:
        raise ConfigError(f"optimizer type={neox_args.optimizer_type!r} must be one of {', '.join(_BUILDERS)}")
    params = dict((neox_args.optimizer or {}).get("params") or {})
    params.setdefault("weight_decay", neox_args.weight_decay)
    groups = [group for group in param_groups if group["params"]]
    return _BUILDERS[kind](groups, params)


def _adam(groups, params):
    """torch's fused Adam: one kernel over all tensors of a group, on CPU and CUDA."""
    decoupled = params.pop("adam_w_mode", True)
    for key in ("torch_adam", "fused", "set_grad_none"):  # how other Adams are switched to what this one does anyway
        params.pop(key, None)
    if not params.pop("bias_correction", True):
        raise ConfigError("optimizer.params.bias_correction=false is not built; remove it")
    return _construct(torch.optim.AdamW if decoupled else torch.optim.Adam, groups, params, fused=True)


def _cpu_adam(groups, params):
    """DeepSpeed's CPU Adam, a C++ extension compiled on first use."""
    print_rank_0("compiling DeepSpeed's cpu_adam (minutes at first use; cpu_torch_adam needs no compiler)")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    params.pop("torch_adam", None)
    try:
        return _construct(DeepSpeedCPUAdam, groups, params)
    except (RuntimeError, ImportError, OSError) as error:
        raise BackendError(
            f"optimizer type=cpu_adam cannot be compiled here ({error}); use cpu_torch_adam, which needs no compiler"
        ) from error


def _cpu_torch_adam(groups, params):
    params.pop("torch_adam", None)
    return _construct(torch.optim.AdamW, groups, params, fused=True)


def _sgd(groups, params):
    return _construct(torch.optim.SGD, groups, params)


def _lion(groups, params):
    return _construct(Lion, groups, params)


def _madgrad_wd(groups, params):
    return _construct(MadgradWD, groups, params)


def _sm3(groups, params):
    if params.pop("weight_decay"):
        print_rank_0("optimizer type=sm3 has no weight decay: weight_decay has no effect")
    return _construct(SM3, groups, params)


_BUILDERS: Dict[str, Callable] = {
    "adam": _adam,
    "cpu_adam": _cpu_adam,
    "cpu_torch_adam": _cpu_torch_adam,
    "sgd": _sgd,
    "lion": _lion,
    "sm3": _sm3,
    "madgrad_wd": _madgrad_wd,
}


def _construct(optimizer_class, groups, params: Dict[str, Any], **fixed):
    accepted = set(inspect.signature(optimizer_class.__init__).parameters) - {"self", "params"}
    unknown = sorted(set(params) - accepted)
    if unknown:
        name = optimizer_class.__name__
        raise ConfigError([f"optimizer.params.{key}={params[key]!r}: {name} has no such parameter" for key in unknown])
    try:
        return optimizer_class(groups, **params, **fixed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params={params}: {error}") from error
