"""One optimizer step, with or without pipeline."""

import math
import time
from typing import Any, Dict, Iterator, Optional

import torch
import torch.distributed as dist

from megatron import mpu
from megatron.training.batch import get_batch
from megatron.training.engine import loss_scale


def train_step(neox_args, engine, data_iterator: Iterator) -> Dict[str, Any]:
    """Run gradient_accumulation_steps micro batches forward and backward and step the optimizer once.

    Returns, equal on every rank: loss (mean over micro batches and data-parallel ranks, nats per token), lr (the rate
    of this step), grad_norm (of the whole model, before clipping; None if it was not finite), skipped (the weights
    were left as they are, because a gradient was not finite), loss_scale (fp16 only, else None). Of this rank:
    data_seconds (waited for the data).
    """
    rate = engine.optimizer.param_groups[0]["lr"]
    scale = loss_scale(engine)
    own = engine.neox_grad_norm
    if own is not None:
        own.reset()
    data = _Waiting(data_iterator)
    if neox_args.is_pipe_parallel:
        loss = engine.train_batch(data_iter=data)
    else:
        loss = _accumulate(neox_args, engine, data)
    skipped = not engine.was_step_applied() or (own is not None and own.skipped)
    norm = engine.get_global_grad_norm() if own is None else own.value
    return dict(
        loss=float(loss),
        lr=rate,
        grad_norm=_finite(norm),
        skipped=skipped,
        loss_scale=scale,
        data_seconds=data.seconds,
    )


class _Waiting:
    """An iterator that counts the seconds for which it was waited for."""

    def __init__(self, iterator: Iterator):
        self._iterator = iterator
        self.seconds = 0.0

    def __iter__(self) -> Iterator:
        return self

    def __next__(self):
        started = time.perf_counter()
        try:
            return next(self._iterator)
        finally:
            self.seconds += time.perf_counter() - started


def _accumulate(neox_args, engine, data_iterator: Iterator) -> torch.Tensor:
    losses = []
    for _ in range(neox_args.gradient_accumulation_steps):
        loss = micro_batch_loss(neox_args, engine, next(data_iterator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return mean_over_replicas(torch.stack(losses).mean())


def micro_batch_loss(neox_args, engine, data: Dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of one micro batch of an engine without pipeline. With fused_loss_chunk the model computes it."""
    inputs, targets = get_batch(neox_args, data)
    if neox_args.fused_loss_chunk is not None:
        return engine(inputs, targets)
    return engine.neox_loss(engine(inputs), targets)


def mean_over_replicas(value: torch.Tensor) -> torch.Tensor:
    """The mean of a scalar over the data-parallel ranks."""
    group, size = mpu.get_data_parallel_group(), mpu.get_data_parallel_world_size()
    if size == 1:
        return value
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total / size


def _finite(norm: Any) -> Optional[float]:
    """DeepSpeed reports an overflow as infinity or -1."""
    norm = None if norm is None else float(norm)
    return norm if norm is not None and math.isfinite(norm) and norm >= 0.0 else None
