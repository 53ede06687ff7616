"""The config dict for deepspeed.initialize."""

import copy
from typing import Any, Dict

from megatron.neox_arguments.derive import is_enabled
from megatron.neox_arguments.fields import NeoXArgsDeepspeedConfig

_ALWAYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "zero_optimization",
)
_NOT_FOR_DEEPSPEED = ("deepspeed", "optimizer", "scheduler", "deepspeed_extra_args")
_KEYS_WITHOUT_MEANING = {"fp16": ("fp16", "type")}
"""GPT-NeoX configs carry them; DeepSpeed has no such options."""


def deepspeed_config(args: Any) -> Dict[str, Any]:
    """DeepSpeed's settings, with deepspeed_extra_args on top.

    The optimizer and the learning-rate schedule are built here and handed to DeepSpeed as objects, except for 1-bit
    Adam, which DeepSpeed builds itself.
    """
    config: Dict[str, Any] = {}
    for name, field in NeoXArgsDeepspeedConfig.__dataclass_fields__.items():
        value = getattr(args, name)
        if name not in _NOT_FOR_DEEPSPEED and (name in _ALWAYS or value != field.default):
            config[name] = copy.deepcopy(value)
    for section, keys in _KEYS_WITHOUT_MEANING.items():
        for key in keys:
            config.get(section, {}).pop(key, None)
    if args.optimizer is not None and args.optimizer_type == "onebitadam":
        config["optimizer"] = _one_bit_adam(args)
        config["scheduler"] = copy.deepcopy(args.scheduler)
    # ZeRO otherwise accepts only DeepSpeed's own optimizers, and would insist on its compiled CPU Adam.
    config["zero_allow_untrusted_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    config.update(copy.deepcopy(args.deepspeed_extra_args or {}))
    return config


def _one_bit_adam(args: Any) -> Dict[str, Any]:
    params = {**args.optimizer.get("params", {}), "lr": args.lr, "weight_decay": args.weight_decay}
    return {"type": "OneBitAdam", "params": copy.deepcopy(params)}


def uses_fp16(args: Any) -> bool:
    """DeepSpeed runs its fp16 optimizer with loss scaling."""
    return is_enabled(deepspeed_config(args).get("fp16"))
