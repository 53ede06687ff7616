"""The loss on held-out data."""

import math
from typing import Dict, Iterator

import deepspeed
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.training.step import mean_over_replicas, micro_batch_loss


def evaluate(neox_args, engine, data_iterator: Iterator) -> Dict[str, float]:
    """Mean loss over eval_iters global batches, dropout off, equal on every rank. The engine trains on afterwards.

    Returns loss (nats per token), ppl (its exponential) and, with char_level_ppl, char_ppl: exp(loss * tokens per
    character of the decoded text).
    """
    counter = _CharacterCounter(data_iterator, neox_args) if neox_args.char_level_ppl else None
    batches = data_iterator if counter is None else counter
    engine.eval()
    losses = [_one_batch(neox_args, engine, batches) for _ in range(neox_args.eval_iters)]
    if neox_args.checkpoint_activations:
        deepspeed.checkpointing.reset()  # buffers that a backward pass would have emptied
    engine.train()
    loss = sum(losses) / len(losses)
    results = {"loss": loss, "ppl": _exp(loss)}
    if counter is not None:
        results["char_ppl"] = _exp(loss * counter.tokens_per_character())
    return results


def _one_batch(neox_args, engine, data_iterator: Iterator) -> float:
    if neox_args.is_pipe_parallel:
        return float(engine.eval_batch(data_iterator))
    losses = []
    with torch.no_grad():
        for _ in range(neox_args.gradient_accumulation_steps):
            losses.append(micro_batch_loss(neox_args, engine, next(data_iterator)))
    return float(mean_over_replicas(torch.stack(losses).mean()))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf


class _CharacterCounter:
    """Passes batches on and counts the predicted tokens and the characters of their text."""

    def __init__(self, data_iterator: Iterator, neox_args):
        self._iterator = data_iterator
        self._tokenizer = neox_args.tokenizer
        self._tokens = self._characters = 0

    def __iter__(self):
        return self

    def __next__(self):
        data = next(self._iterator)
        for row in data["text"][:, 1:].tolist():
            self._tokens += len(row)
            self._characters += len(self._tokenizer.detokenize(row))
        return data

    def tokens_per_character(self) -> float:
        """Over all ranks; those that read nothing (inner pipeline stages) add nothing."""
        counts = torch.tensor([self._tokens, self._characters], dtype=torch.float32, device=mpu.current_device())
        if dist.is_initialized():
            dist.all_reduce(counts)
        return (counts[0] / counts[1].clamp(min=1)).item()
