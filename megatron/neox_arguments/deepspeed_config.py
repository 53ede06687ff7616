"""The config dict for deepspeed.initialize."""

import copy
from typing import Any, Dict

from megatron.neox_arguments.deepspeed_keys import IGNORED
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


def deepspeed_config(args: Any) -> Dict[str, Any]:
    """DeepSpeed's settings, with deepspeed_extra_args on top.

    The optimizer and the learning-rate schedule are not among them: they are handed to DeepSpeed as objects.
    """
    config: Dict[str, Any] = {}
    for name, field in NeoXArgsDeepspeedConfig.__dataclass_fields__.items():
        value = getattr(args, name)
        if name not in _NOT_FOR_DEEPSPEED and (name in _ALWAYS or value != field.default):
            config[name] = copy.deepcopy(value)
    for section, keys in IGNORED.items():
        for key in keys:
            config.get(section, {}).pop(key, None)
    # ZeRO otherwise accepts only DeepSpeed's own optimizers, and would insist on its compiled CPU Adam.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    config.update(copy.deepcopy(args.deepspeed_extra_args or {}))
    return config
