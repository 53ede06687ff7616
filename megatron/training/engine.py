"""Model, optimizer, schedule and DeepSpeed engine of a run."""

from functools import partial
from typing import Any, Dict

import deepspeed
import torch

from megatron import mpu
from megatron.checkpointing import load_checkpoint
from megatron.errors import BackendError
from megatron.logging.quiet import is_verbose, without_library_prints
from megatron.model.gpt2_model import build_model, cross_entropy
from megatron.model.utils import get_params_for_weight_decay_optimization
from megatron.training.batch import get_batch
from megatron.training.gradients import GradientNorm
from megatron.training.learning_rates import get_learning_rate_scheduler
from megatron.training.optimizers import get_optimizer


def setup_model_and_optimizer(neox_args):
    """Build the DeepSpeed engine, load `neox_args.load` into it, and set neox_args.iteration. Called on every rank.

    The engine is a PipelineEngine for pipe_parallel_size >= 1, else a DeepSpeedEngine. Besides DeepSpeed's attributes
    it has `neox_loss`, the loss function, and `neox_grad_norm`, a GradientNorm or None where DeepSpeed clips.

    Raises BackendError for a combination that DeepSpeed refuses on this machine, CheckpointError, ConfigError.
    """
    _refuse(neox_args)
    with without_library_prints(neox_args):
        model = build_model(neox_args, mpu.get_topology())
        engine = _build_engine(neox_args, model)
    wanted = neox_args.iteration
    neox_args.iteration = load_checkpoint(neox_args, engine, wanted) if neox_args.load else 0
    return engine


def _build_engine(neox_args, model):
    groups = get_params_for_weight_decay_optimization(model, neox_args)
    optimizer = get_optimizer(neox_args, groups)
    by_deepspeed = optimizer is None  # onebitadam, with the schedule that DeepSpeed has for it
    config = _deepspeed_config(neox_args)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups if by_deepspeed else None,
        lr_scheduler=None if by_deepspeed else partial(get_learning_rate_scheduler, neox_args),
        mpu=None if neox_args.is_pipe_parallel else mpu,
        config=config,
        dist_init_required=False,
    )
    if not by_deepspeed:
        # Mixed-precision and ZeRO optimizers have parameter groups of their own.
        engine.lr_scheduler.optimizer = engine.optimizer
    engine.neox_loss = cross_entropy(neox_args)
    engine.neox_grad_norm = None
    if _clips_here(neox_args):
        engine.neox_grad_norm = GradientNorm(
            engine.basic_optimizer, neox_args.gradient_clipping, engine.mpu.get_model_parallel_group()
        )
    if neox_args.is_pipe_parallel:
        engine.set_batch_fn(partial(get_batch, neox_args))
        # DeepSpeed takes any class named GPT2ModelPipe to send an attention mask between stages; this one does not.
        engine.set_has_attention_mask(False)
    return engine


def _clips_here(neox_args) -> bool:
    """A plain torch optimizer steps the model's own parameters: see gradients.py."""
    return neox_args.precision == "fp32" and neox_args.zero_stage == 0 and neox_args.optimizer_type != "onebitadam"


def _deepspeed_config(neox_args) -> Dict[str, Any]:
    config = neox_args.deepspeed_config
    config["zero_allow_untested_optimizer"] = True
    if _clips_here(neox_args):
        config["gradient_clipping"] = 0.0
    if not is_verbose(neox_args):
        config["steps_per_print"] = None  # its lines would tear the progress bar, and say what that says
    return config


def _refuse(neox_args) -> None:
    """What DeepSpeed would fail on later with an assertion of its own."""
    device = mpu.current_device().type
    problems = []
    if neox_args.optimizer_type == "onebitadam":
        if device == "cpu":
            problems.append("optimizer type=onebitadam needs GPUs (nccl); use adam")
        if neox_args.zero_stage > 0:
            problems.append(f"optimizer type=onebitadam excludes ZeRO (zero_optimization.stage={neox_args.zero_stage})")
    if problems:
        raise BackendError("; ".join(problems))


def loss_scale(engine) -> float | None:
    """The fp16 loss scale in use; None in other precisions."""
    if not engine.fp16_enabled():
        return None
    for name in ("loss_scale", "cur_scale"):
        scale = getattr(engine.optimizer, name, None)
        if scale is not None:
            return scale.item() if isinstance(scale, torch.Tensor) else float(scale)
    return None
