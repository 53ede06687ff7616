"""Model, optimizer, schedule and DeepSpeed engine of a run."""

from functools import partial
from typing import Any, Dict, List

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from megatron import mpu
from megatron.checkpointing import load_checkpoint
from megatron.costs import stage_layers
from megatron.errors import BackendError, ConfigError
from megatron.initialize import print_rank_0
from megatron.logging.quiet import is_verbose, without_library_prints
from megatron.model.gpt2_model import build_model, cross_entropy
from megatron.model.utils import get_params_for_weight_decay_optimization
from megatron.training.batch import get_batch
from megatron.training.gradients import GradientNorm
from megatron.training.learning_rates import get_learning_rate_scheduler
from megatron.training.master_weights import MasterWeightOptimizer
from megatron.training.optimizers import get_optimizer


def setup_model_and_optimizer(neox_args):
    """Build the DeepSpeed engine, load `neox_args.load` into it, and set neox_args.iteration. Called on every rank.

    The engine is a PipelineEngine for pipe_parallel_size >= 1, else a DeepSpeedEngine. Besides DeepSpeed's attributes
    it has `neox_loss`, the loss function of logits, and `neox_grad_norm`, a GradientNorm or None where DeepSpeed clips.

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
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=partial(get_learning_rate_scheduler, neox_args),
        mpu=None if neox_args.is_pipe_parallel else mpu,
        config=_deepspeed_config(neox_args),
        dist_init_required=False,
    )
    # Mixed-precision and ZeRO optimizers have parameter groups of their own.
    engine.lr_scheduler.optimizer = engine.optimizer
    engine.neox_loss = cross_entropy(neox_args)
    engine.neox_grad_norm = _own_clipping(neox_args, engine) if _clips_here(neox_args) else None
    _without_replicas(engine)
    if neox_args.is_pipe_parallel:
        engine.set_batch_fn(partial(get_batch, neox_args))
        _let_stages_time_themselves(engine)
    return engine


def _let_stages_time_themselves(engine) -> None:
    """With wall_clock_breakdown, stages before the last start the backward timers, and then the engine's base class
    starts them again, on which DeepSpeed asserts. GPT-NeoX's configs set wall_clock_breakdown."""
    if not engine.is_last_stage():
        timers = engine.engine_timers
        timers.backward_timers = timers.backward_inner_timers = timers.backward_reduce_timers = []


def _clips_here(neox_args) -> bool:
    """Where DeepSpeed's own norm is not the true one: see gradients.py."""
    in_bf16 = neox_args.precision == "bfloat16" and not neox_args.is_pipe_parallel
    return neox_args.zero_stage == 0 and (neox_args.precision == "fp32" or in_bf16)


def _own_clipping(neox_args, engine) -> GradientNorm:
    norm = GradientNorm(neox_args.gradient_clipping, engine.mpu.get_model_parallel_group())
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        MasterWeightOptimizer.take_over(engine.optimizer, norm)
    else:
        norm.watch(engine.basic_optimizer)
    return norm


def _without_replicas(engine) -> None:
    """Without ZeRO, DeepSpeed sums gradients over the replicas in a copy of them, also if there is one replica."""
    if mpu.get_data_parallel_world_size() == 1 and not engine.zero_optimization():
        engine.enable_backward_allreduce = engine.pipeline_enable_backward_allreduce = False


def _deepspeed_config(neox_args) -> Dict[str, Any]:
    config = neox_args.deepspeed_config
    if _clips_here(neox_args):
        config["gradient_clipping"] = 0.0
    if _needs_zero_for_fp16(neox_args):
        config["zero_optimization"]["stage"] = 1
        print_rank_0("fp16 without ZeRO runs as ZeRO stage 1: this DeepSpeed scales the loss only there")
    if not is_verbose(neox_args):
        config["steps_per_print"] = None  # its lines would tear the progress bar, and say what that says
    return config


def _needs_zero_for_fp16(neox_args) -> bool:
    """DeepSpeed 0.19 divides fp16 gradients by the loss scale, but multiplies the loss by it under ZeRO only; without,
    small gradients vanish and none is ever clipped. Stage 1 steps the same, and keeps less on each replica."""
    return neox_args.precision == "fp16" and neox_args.zero_stage == 0


def _refuse(neox_args) -> None:
    """What DeepSpeed would fail on later with an error of its own."""
    device = mpu.current_device().type
    problems = []
    if neox_args.precision == "fp16" and not get_accelerator().is_fp16_supported():
        problems.append(f"precision=fp16: DeepSpeed does not train in fp16 on this {device}; use bfloat16 or fp32")
    if neox_args.precision == "bfloat16" and not get_accelerator().is_bf16_supported():
        problems.append(f"precision=bfloat16: this {device} has no bfloat16; use fp16 or fp32")
    if problems:
        raise BackendError("; ".join(problems))
    if neox_args.lora is not None and not all(_transformer_layers_by_stage(neox_args)):
        raise ConfigError(
            f"pipe_partition_method={neox_args.pipe_partition_method}: a pipeline stage gets no transformer layer, and "
            "so nothing that lora trains; use type:transformer or fewer stages"
        )


def _transformer_layers_by_stage(neox_args) -> List[range]:
    return [stage_layers(neox_args, stage) for stage in range(max(1, neox_args.pipe_parallel_size))]


def loss_scale(engine) -> float | None:
    """The fp16 loss scale in use; None in other precisions."""
    if not engine.fp16_enabled():
        return None
    for name in ("loss_scale", "cur_scale"):
        scale = getattr(engine.optimizer, name, None)
        if scale is not None:
            return scale.item() if isinstance(scale, torch.Tensor) else float(scale)
    return None
