"""The config dict for deepspeed.initialize."""

import copy
from typing import Any, Dict

from megatron.neox_arguments.deepspeed_keys import IGNORED
from megatron.neox_arguments.fields import NeoXArgsDeepspeedConfig
from megatron.neox_arguments.support import REFUSED

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
        # A refused section is here only if it is switched off; DeepSpeed raises on some of them all the same.
        if name in _NOT_FOR_DEEPSPEED or name in REFUSED:
            continue
        if name in _ALWAYS or value != field.default:
            config[name] = copy.deepcopy(value)
    for section, keys in IGNORED.items():
        for key in keys:
            config.get(section, {}).pop(key, None)
    # ZeRO otherwise accepts only DeepSpeed's own optimizers, and would insist on its compiled CPU Adam.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    if args.is_pipe_parallel and args.sequence_parallel:
        # DeepSpeed sends each tensor-parallel rank's piece of what it takes to be one tensor; here they hold
        # different parts of the sequence, and the rest of each would be lost without an error.
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if args.dump_state or (args.comms_logger or {}).get("enabled"):
        config["log_level"] = "info"  # below that DeepSpeed shows neither
    config.update(copy.deepcopy(args.deepspeed_extra_args or {}))
    return config
