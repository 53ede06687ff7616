"""Work out the arguments that follow from others. Pure: values in, values out; nothing is checked here.

Each function takes the settings (an attribute per argument) and returns the arguments it decides. Where the settings
make no sense the result is a guess; validate.py then says what is wrong.
"""

from types import SimpleNamespace
from typing import Any, Dict, List, Mapping, Optional

from megatron.neox_arguments.per_layer import expand, number_of_layers

ZERO_DEFAULTS = {
    "stage": 0,
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "overlap_comm": False,
    "contiguous_gradients": False,
}
DEFAULT_LR = 0.001
_FROM_PRECISION = {"fp16": "fp16", "bfloat16": "bf16"}


def derive(values: Mapping[str, Any], world_size: Optional[int] = None) -> Dict[str, Any]:
    """The derived arguments of `values`, which holds every argument by name.

    world_size is the number of processes, where the caller knows it. `gradient_accumulation_steps` None means: follow
    from the batch sizes.
    """
    settings = SimpleNamespace(**values)
    derived: Dict[str, Any] = {}
    for step in (_parallel, _batch, _precision, _zero, _optimizer, _attention, _data, _rest):
        result = step(settings, world_size) if step is _parallel else step(settings)
        derived.update(result)
        vars(settings).update(result)
    return derived


def data_parallel_size(settings: Any) -> int:
    """Replicas of the model; 0 if the processes do not hold even one."""
    return settings.global_num_gpus // model_ranks(settings)


def model_ranks(settings: Any) -> int:
    """Processes that hold one copy of the model: pipeline stages times tensor-parallel ranks (at least 1)."""
    return max(settings.pipe_parallel_size, 1) * max(settings.model_parallel_size, 1)


def stage_of(zero_optimization: Optional[dict]) -> Any:
    """The ZeRO stage of a DeepSpeed `zero_optimization` mapping."""
    return (zero_optimization or {}).get("stage", ZERO_DEFAULTS["stage"])


def is_enabled(section: Optional[dict]) -> bool:
    """A DeepSpeed section such as fp16 or bf16 is there and switched on."""
    return isinstance(section, dict) and section.get("enabled", False) is True


def precision_section(settings: Any, name: str) -> Optional[dict]:
    """The `fp16` or `bf16` mapping, from the top level or from deepspeed_extra_args."""
    return getattr(settings, name) or (settings.deepspeed_extra_args or {}).get(name)


def expand_attention_config(config: Optional[list], num_layers: Optional[int]) -> List[Any]:
    """One attention kind per layer, by the rules of per_layer.expand; None is "auto" everywhere."""
    if config is None:
        return ["auto"] * number_of_layers(num_layers)
    return _lower(expand(config, num_layers))


def expand_layer_types(config: Optional[list], num_layers: Optional[int], has_window: bool) -> List[Any]:
    """One layer type per layer. None is one type for all, with or without the window.

    Unlike attention kinds, "all" may be cut off at the last layer: real models repeat a pattern whose length does not
    divide their depth.
    """
    if config is None:
        return ["sliding_attention" if has_window else "full_attention"] * number_of_layers(num_layers)
    return _lower(expand(config, num_layers, cut_off=True))


def _lower(names: List[Any]) -> List[Any]:
    return [name.lower() if isinstance(name, str) else name for name in names]


def _parallel(settings: Any, world_size: Optional[int]) -> Dict[str, Any]:
    processes = settings.global_num_gpus or settings.world_size or world_size
    if not processes and settings.hostfile is None:
        processes = settings.num_gpus
    return {
        "model_parallel_size": settings.model_parallel_size or 1,
        "is_pipe_parallel": settings.pipe_parallel_size >= 1,
        "global_num_gpus": processes or model_ranks(settings),
    }


def _batch(settings: Any) -> Dict[str, Any]:
    replicas = max(data_parallel_size(settings), 1)
    total = settings.train_batch_size
    micro = settings.train_micro_batch_size_per_gpu
    accumulation = settings.gradient_accumulation_steps
    if total is not None and micro is not None and accumulation is None:
        accumulation = total // max(micro * replicas, 1)
    elif total is not None and micro is None:
        accumulation = accumulation or 1
        micro = total // (replicas * accumulation)
    elif total is None and micro is not None:
        accumulation = 1 if accumulation is None else accumulation
        total = micro * replicas * accumulation
    return {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "batch_size": micro,
        "clip_grad": settings.gradient_clipping,
    }


def _precision(settings: Any) -> Dict[str, Any]:
    precision = settings.precision
    if precision is None:
        enabled = [name for name, key in _FROM_PRECISION.items() if is_enabled(precision_section(settings, key))]
        precision = enabled[0] if enabled else "fp32"
    derived = {"precision": precision}
    key = _FROM_PRECISION.get(precision)
    if key and not is_enabled(precision_section(settings, key)) and not _in_extra(settings, key):
        derived[key] = {**(getattr(settings, key) or {}), "enabled": True}
    return derived


def _in_extra(settings: Any, key: str) -> bool:
    return key in (settings.deepspeed_extra_args or {})


def _zero(settings: Any) -> Dict[str, Any]:
    zero = dict(ZERO_DEFAULTS) if settings.zero_optimization is None else settings.zero_optimization

    def setting(name):
        return zero.get(name, ZERO_DEFAULTS[name])

    return {
        "zero_optimization": zero,
        "zero_stage": setting("stage"),
        "zero_reduce_scatter": setting("reduce_scatter"),
        "zero_contiguous_gradients": setting("contiguous_gradients"),
        "zero_reduce_bucket_size": _whole(setting("reduce_bucket_size")),
        "zero_allgather_bucket_size": _whole(setting("allgather_bucket_size")),
    }


def _whole(number: Any) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _optimizer(settings: Any) -> Dict[str, Any]:
    if settings.optimizer is None:
        return {"lr": DEFAULT_LR if settings.lr is None else settings.lr}
    kind = settings.optimizer.get("type", "Adam")
    params = settings.optimizer.get("params")
    lr = params.get("lr", DEFAULT_LR) if isinstance(params, dict) else DEFAULT_LR
    return {
        "optimizer_type": kind.lower() if isinstance(kind, str) else kind,
        "lr": float(lr) if type(lr) is int else lr,
    }


def _attention(settings: Any) -> Dict[str, Any]:
    has_window = settings.sliding_window_width is not None
    return {
        "attention_config": expand_attention_config(settings.attention_config, settings.num_layers),
        "layer_types": expand_layer_types(settings.layer_types, settings.num_layers, has_window),
    }


def _data(settings: Any) -> Dict[str, Any]:
    derived = {}
    for split in ("train", "valid", "test"):
        paths, weights = getattr(settings, f"{split}_data_paths"), getattr(settings, f"{split}_data_weights")
        if paths and weights is None:
            derived[f"{split}_data_weights"] = [1.0] * len(paths)
    return derived


def _rest(settings: Any) -> Dict[str, Any]:
    return {
        "dynamic_loss_scale": settings.loss_scale is None,
        "text_gen_type": settings.text_gen_type or ("input-file" if settings.sample_input_file else "unconditional"),
    }
