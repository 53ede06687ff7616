"""The output layer and the cross entropy as one function, a chunk of tokens at a time.

The logits of a chunk are made, measured, turned into their own gradient, and used for the gradients of hidden states,
weight and bias before those of the next chunk are made: a tensor of all tokens x vocabulary never exists, and nothing
is computed twice. Liger Kernel's way (Hsu et al. 2024, arXiv:2410.10989, section 3.2), here also over a vocabulary that
is split over the model-parallel ranks.
"""

from typing import Iterator, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist

from megatron.mpu.cross_entropy import _locate, _reduced
from megatron.mpu.groups import get_model_parallel_world_size
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.mappings import copy_to_model_parallel_region, gather_from_sequence_parallel_region

Targets = Tuple[torch.Tensor, torch.Tensor]
"""(labels [b, s] int64, loss_mask [b, s])"""

IN_CACHE = 2**20
"""fp32 numbers that a chain of operations on the CPU takes at a time, so that they stay in its cache."""


def mean_over_tokens(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A sum of losses, weighted already, over the sum of the weights; 0 when every token is masked."""
    total = weights.sum()
    return losses / torch.where(total > 0, total, 1.0)


class FusedLinearCrossEntropy:
    """(hidden [b, s, h], weight [v/p, h], bias [v/p] or None, targets) -> fp32 mean loss over the unmasked tokens.

    chunk: tokens whose logits exist at one time. softcap: of the logits, see soft_cap in model/transformer.py.
    hidden holds the whole sequence, and what sums its gradient over the model-parallel ranks comes before.

    As without fusion the logits have the model's precision and their softmax is fp32. The softmax minus one-hot is
    kept as it is, and what the loss is multiplied by (1 / tokens, a loss scale) acts on the three gradients at the
    end: in fp16 the softmax would vanish otherwise. The weight's gradient is summed over the chunks in fp32.
    """

    def __init__(self, chunk: int, softcap: Optional[float] = None):
        self.chunk = chunk
        self.softcap = softcap

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], targets: Targets
    ) -> torch.Tensor:
        labels, loss_mask = (tensor.flatten() for tensor in targets)
        weights = loss_mask.float()
        losses = _Fused.apply(hidden.flatten(0, -2), weight, bias, labels, weights, self, torch.is_grad_enabled())
        return mean_over_tokens(losses, weights)


class FusedLossLinear(ColumnParallelLinear):
    """The output layer, which gives the loss instead of logits when it gets targets.

    It has the weights itself, so that ZeRO 3 gathers them for both.
    """

    def __init__(self, neox_args, input_size: int, output_size: int, *, loss: FusedLinearCrossEntropy, **settings):
        super().__init__(neox_args, input_size, output_size, **settings)
        self.loss = loss

    def forward(self, input_: torch.Tensor, targets: Optional[Targets] = None):
        """input_ [b, s, h] -> ColumnParallelLinear's (logits, None), or with targets (loss, None)."""
        if targets is None:
            return super().forward(input_)
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, self.seq_dim)
        else:
            hidden = copy_to_model_parallel_region(input_)
        return self.loss(hidden, self.weight, self.bias, targets), None


class _Chunk(NamedTuple):
    """hidden [k, h]; row of the label in this rank's shard, and whether it is this rank's; weights of the losses."""

    hidden: torch.Tensor
    rows: torch.Tensor
    owned: torch.Tensor
    weights: torch.Tensor


class _Fused(torch.autograd.Function):
    """The weighted sum of the losses. `differentiable`: autograd is on outside, so gradients are wanted."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, weights, settings, differentiable):
        wanted = [differentiable and needed for needed in ctx.needs_input_grad[:3]]
        total, sums = weights.new_zeros(()), _Gradients(hidden, weight, bias, wanted, settings.chunk < len(hidden))
        buffer = hidden.new_empty(min(settings.chunk, len(hidden)), len(weight))
        for chunk in _chunks(hidden, weight, labels, weights, settings.chunk):
            logits = torch.mm(chunk.hidden, weight.T, out=buffer[: len(chunk.hidden)])  # [k, v/p]
            if bias is not None:
                logits += bias
            slope = _cap(logits, settings.softcap)
            total += _losses(logits, chunk)
            if any(wanted):
                sums.add(logits if slope is None else logits.mul_(slope), chunk, weight)
        ctx.save_for_backward(sums.hidden, sums.weight, sums.bias)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, factor):
        gradients = (None if sums is None else _scaled(sums, factor, ctx.dtype) for sums in ctx.saved_tensors)
        return (*gradients, None, None, None, None)


def _chunks(hidden, weight, labels, weights, size: int) -> Iterator[_Chunk]:
    rows, owned, ignored = _locate(labels, len(weight))
    split = (tensor.split(size) for tensor in (hidden, rows, owned, weights.masked_fill(ignored, 0.0)))
    return (_Chunk(*each) for each in zip(*split, strict=True))


def _cap(logits: torch.Tensor, cap: Optional[float]) -> Optional[torch.Tensor]:
    """Cap logits in place; the derivative of the capped by the uncapped ones, None without a cap."""
    if cap is None:
        return None
    bent = logits.div_(cap).tanh_()
    slope = (bent * bent).neg_().add_(1)
    bent.mul_(cap)
    return slope


def _losses(logits: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """The weighted sum of a chunk's losses; its logits become softmax - one-hot, their own unweighted gradients.

    Each rank takes the softmax over its shard. With z its normaliser and Z that of all ranks, exp(z - Z) of it is the
    rank's part of the whole softmax.
    """
    at_labels = torch.arange(len(logits), device=logits.device), chunk.rows
    picked = logits[at_labels].float()  # [k]
    own = _softmax(logits)
    normaliser, at_label = own, picked * chunk.owned
    if get_model_parallel_world_size() > 1:
        largest = _reduced(own.clone(), dist.ReduceOp.MAX)
        exponentials, at_label = _reduced(torch.stack([(own - largest).exp(), at_label]), dist.ReduceOp.SUM)
        normaliser = largest + exponentials.log()
        shares, size = (own - normaliser).exp().unsqueeze(-1), _rows_at_once(logits)
        for block, share in zip(logits.split(size), shares.split(size), strict=True):
            block *= share  # of all rows at once, torch would make copies of bf16 logits in fp32
    probability = (picked - normaliser).exp()
    logits[at_labels] = (probability - chunk.owned.float()).to(logits.dtype)  # scatter_ would copy all to fp32
    return ((normaliser - at_label) * chunk.weights).sum()


def _rows_at_once(logits: torch.Tensor) -> int:
    return max(1, IN_CACHE // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in place, computed in fp32; returns the log of the normalisers, fp32 [k]."""
    return torch.cat([_softmax_at_once(block) for block in logits.split(_rows_at_once(logits))])


def _softmax_at_once(logits: torch.Tensor) -> torch.Tensor:
    """The normaliser follows from the largest logit and its probability, which cannot be 0."""
    values = logits.float()
    softmax = torch.softmax(values, -1)
    normaliser = values.amax(-1) - softmax.amax(-1).log()
    logits.copy_(softmax)
    return normaliser


class _Gradients:
    """Sums over chunks of the gradients of hidden states, weight and bias; None for what is not wanted."""

    def __init__(self, hidden, weight, bias, wanted, several: bool):
        precision = torch.promote_types(weight.dtype, torch.float32) if several else weight.dtype
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=precision) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=precision) if wanted[2] else None
        self._done = 0

    def add(self, gradient: torch.Tensor, chunk: _Chunk, weight: torch.Tensor) -> None:
        """gradient [k, v/p] of a chunk's logits, unweighted. The weights act on the smaller factor of each product."""
        weights = chunk.weights.to(gradient.dtype)
        if self.hidden is not None:
            part = self.hidden[self._done : self._done + len(gradient)]
            torch.mm(gradient, weight, out=part).mul_(weights.unsqueeze(-1))
        if self.weight is not None:
            _add_product(self.weight, gradient.T, chunk.hidden * weights.unsqueeze(-1))
        if self.bias is not None:
            self.bias += weights @ gradient
        self._done += len(gradient)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, where total may be of higher precision: then some rows at a time, in cache."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    size = max(1, 2 * IN_CACHE // total.shape[-1])
    for part, factor in zip(total.split(size), left.split(size), strict=True):
        part += factor @ right


def _scaled(sums: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """sums * factor, rounded once, without a whole copy in fp32. factor is a tensor, which no one has to wait for."""
    result = torch.empty_like(sums, dtype=dtype)
    size = max(1, IN_CACHE // sums[0].numel())
    for part, block in zip(result.split(size), sums.split(size), strict=True):
        part.copy_(block.float() * factor)
    return result
