"""Cross entropy of logits whose vocabulary is split over the model-parallel ranks."""

import torch
import torch.distributed as dist

from megatron.mpu.groups import get_model_parallel_group, get_model_parallel_rank, get_model_parallel_world_size
from megatron.mpu.layers import local_rows

IGNORED_LABEL = -100
"""A position with this label has loss 0 and gradient 0, as in torch.nn.functional.cross_entropy."""


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, in_half: bool = False) -> torch.Tensor:
    """logits [..., v/p] of any float dtype, labels [...] int64 -> fp32 loss [...], the same on all ranks.

    loss = log(sum_i exp(x_i)) - x_label over the vocabulary of all ranks, padded rows included.
    in_half: compute in the logits' own dtype instead of fp32 (fp16_lm_cross_entropy).
    The logits are not changed, and neither they nor a softmax are copied for the backward pass.
    A label outside the vocabulary, other than -100, is an error.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, in_half)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, in_half):
        values = logits if in_half else logits.float()
        rows, owned, ignored = _locate(labels, logits.shape[-1])
        largest = _reduced(values.amax(-1), dist.ReduceOp.MAX)
        picked = values.gather(-1, rows.unsqueeze(-1)).squeeze(-1) - largest
        sums = torch.stack([(values - largest.unsqueeze(-1)).exp().sum(-1), picked * owned])
        exponentials, picked = _reduced(sums, dist.ReduceOp.SUM)
        log_sum = exponentials.log()
        ctx.save_for_backward(logits, log_sum + largest, rows, owned, ignored)
        ctx.in_half = in_half
        return (log_sum - picked).masked_fill(ignored, 0.0).float()

    @staticmethod
    def backward(ctx, gradient):
        logits, log_normaliser, rows, owned, ignored = ctx.saved_tensors
        values = logits if ctx.in_half else logits.float()
        # d loss / d x_i = softmax_i - [i is the label]
        result = (values - log_normaliser.unsqueeze(-1)).exp()
        result.scatter_add_(-1, rows.unsqueeze(-1), -owned.to(result.dtype).unsqueeze(-1))
        weights = gradient.to(result.dtype).masked_fill(ignored, 0.0)
        return (result * weights.unsqueeze(-1)).to(logits.dtype), None, None


def _locate(labels: torch.Tensor, rows_per_rank: int):
    """(row in this rank's shard, whether the label is this rank's, whether it is to be ignored) for each label."""
    ignored = labels == IGNORED_LABEL
    start = get_model_parallel_rank() * rows_per_rank
    vocabulary = get_model_parallel_world_size() * rows_per_rank
    rows, owned = local_rows(labels.masked_fill(ignored, 0), start, start + rows_per_rank, vocabulary)
    return rows, owned & ~ignored, ignored


def _reduced(tensor: torch.Tensor, operation) -> torch.Tensor:
    """Reduce a tensor made here, in place, over the model-parallel ranks."""
    if get_model_parallel_world_size() > 1:
        dist.all_reduce(tensor, op=operation, group=get_model_parallel_group())
    return tensor
