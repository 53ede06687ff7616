"""What is wrong with the settings of a run: optimizer, schedule, data, checkpoints, generation."""

from typing import Any, Iterator

from megatron.neox_arguments.support import TE_LAYERS

_OPTIMIZERS = ("adam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "sgd", "lion")
_BACKENDS = ("nccl", "gloo", "mpi", "ccl", "hccl", "xccl", "ucc")
_GENERATION = ("unconditional", "input-file", "interactive", "precompute")


def _optimizer(settings: Any) -> Iterator[str]:
    section = settings.optimizer
    if section is None:
        return
    kind, params = section.get("type"), section.get("params")
    if str(kind).lower() == "onebitadam":
        yield "optimizer.type=onebitadam: DeepSpeed 0.19 no longer has 1-bit Adam; use adam"
    elif not isinstance(kind, str) or kind.lower() not in _OPTIMIZERS:
        yield f"optimizer.type={kind!r} must be one of {', '.join(_OPTIMIZERS)}"
    unknown = sorted(set(section) - {"type", "params"})
    if unknown:
        yield f"optimizer.{unknown[0]} is not known; an optimizer has a type and params"
    if not isinstance(params, dict):
        yield f"optimizer.params={params!r} must be a mapping, for example {{lr: 1.0e-3}}"
        return
    lr = params.get("lr")
    if lr is not None and (type(lr) not in (int, float) or not 0 < lr < float("inf")):
        yield f"optimizer.params.lr={lr!r} must be a number greater than 0"
    if "weight_decay" in params:
        yield "optimizer.params.weight_decay: weight_decay is a setting of its own; move it to the top level"


def _schedule(settings: Any) -> Iterator[str]:
    if type(settings.lr) in (int, float) and settings.min_lr > settings.lr:
        yield f"min_lr={settings.min_lr} is above the learning rate {settings.lr}; it must not be"
    if settings.lr_decay_iters is not None and settings.lr_decay_fraction is not None:
        yield (
            f"lr_decay_iters={settings.lr_decay_iters} and lr_decay_fraction={settings.lr_decay_fraction} both give "
            "the length of the decay; keep one"
        )
    if settings.override_lr_scheduler and settings.use_checkpoint_lr_scheduler:
        yield "override_lr_scheduler and use_checkpoint_lr_scheduler contradict each other; keep one"
    if settings.train_iters is not None and settings.train_epochs is not None:
        yield (
            f"train_iters={settings.train_iters} and train_epochs={settings.train_epochs} both give the length of "
            "training; keep one"
        )
    scheduler = settings.scheduler
    if scheduler is not None and not (
        isinstance(scheduler.get("type"), str) and isinstance(scheduler.get("params"), dict)
    ):
        yield f"scheduler={scheduler} must hold a type (a string) and params (a mapping)"


def _data(settings: Any) -> Iterator[str]:
    splits = ("train", "valid", "test")
    given = [split for split in splits if getattr(settings, f"{split}_data_paths") is not None]
    if given and len(given) < len(splits):
        missing = [f"{split}_data_paths" for split in splits if split not in given]
        yield f"{given[0]}_data_paths is set, so {' and '.join(missing)} must be too"
    if given and settings.data_path is not None:
        yield f"data_path={settings.data_path} and {given[0]}_data_paths exclude each other; keep one"
    for split in splits:
        yield from _split_problems(settings, split)


def _split_problems(settings: Any, split: str) -> Iterator[str]:
    name = f"{split}_data_paths"
    paths = getattr(settings, name)
    if paths is not None and (not paths or not all(isinstance(path, str) for path in paths)):
        yield f"{name}={paths} must be a list of data set prefixes"
        return
    for other in (f"{split}_label_data_paths", f"{split}_data_weights"):
        values = getattr(settings, other)
        if values is None:
            continue
        if paths is None:
            yield f"{other} belongs to {name}, which is not set"
        elif len(values) != len(paths):
            yield f"{other} has {len(values)} items and {name} has {len(paths)}; they must match"
    weights = getattr(settings, f"{split}_data_weights") or []
    if not all(type(weight) in (int, float) and weight >= 0 for weight in weights) or (weights and not any(weights)):
        yield f"{split}_data_weights={weights} must be numbers that are not negative, and not all 0"


def _saving(settings: Any) -> Iterator[str]:
    factor, extra = settings.checkpoint_factor, settings.extra_save_iters
    if settings.save is not None and factor is None and not extra:
        yield f"save={settings.save} needs checkpoint_factor (how often) or extra_save_iters (when)"
    if settings.checkpoint_scale == "log" and factor is not None and factor <= 1:
        yield f"checkpoint_scale=log multiplies by checkpoint_factor={factor}, which must be above 1"
    if settings.checkpoint_scale == "linear" and type(factor) is float and not factor.is_integer():
        yield f"checkpoint_scale=linear saves every checkpoint_factor={factor} iterations, which must be whole"
    if extra is not None and not all(type(number) is int and number >= 0 for number in extra):
        yield f"extra_save_iters={extra} must be a list of iterations, whole numbers from 0"


def _activation_checkpointing(settings: Any) -> Iterator[str]:
    count, layers = settings.checkpoint_num_layers, settings.num_layers
    if settings.checkpoint_activations and layers is not None and count > layers > 0:
        yield f"checkpoint_num_layers={count} is more than num_layers={layers}"
    if settings.contiguous_checkpointing and not settings.partition_activations:
        yield "contiguous_checkpointing=True stores partitioned activations, so it needs partition_activations=True"
    if settings.checkpoint_in_cpu and not settings.partition_activations:
        yield "checkpoint_in_cpu=True moves partitioned activations, so it needs partition_activations=True"


def _compile(settings: Any) -> Iterator[str]:
    with_te = [name for name in TE_LAYERS if getattr(settings, name)]
    if settings.compile is True and with_te:
        yield f"compile=True does not go with {with_te[0]}=True: Transformer Engine's layers are kernels already"


def _generation(settings: Any) -> Iterator[str]:
    if settings.text_gen_type not in _GENERATION:
        yield f"text_gen_type={settings.text_gen_type!r} must be one of {', '.join(_GENERATION)}"
    if settings.text_gen_type == "input-file" and not settings.sample_input_file:
        yield "text_gen_type=input-file needs sample_input_file, the file of prompts"
    if not settings.prompt_end:
        yield "prompt_end is empty; it separates prompts, so it must be a string of at least one character"


def _machinery(settings: Any) -> Iterator[str]:
    if settings.distributed_backend not in _BACKENDS:
        yield f"distributed_backend={settings.distributed_backend!r} must be one of {', '.join(_BACKENDS)}"
    if settings.include and settings.exclude:
        yield f"include={settings.include} and exclude={settings.exclude} cannot be used together"
    for name in ("comment", "account"):
        if getattr(settings, name) and settings.launcher != "slurm":
            yield f"{name}={getattr(settings, name)} is an option of launcher=slurm, not {settings.launcher}; remove it"
    if settings.profile and not 0 <= settings.profile_step_start < settings.profile_step_stop:
        yield (
            f"profile_step_start={settings.profile_step_start} must come before "
            f"profile_step_stop={settings.profile_step_stop}"
        )


CHECKS = (_optimizer, _schedule, _data, _saving, _activation_checkpointing, _compile, _generation, _machinery)
