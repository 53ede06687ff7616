"""The matrix products of the chunked kernel, on one block of queries and keys at a time.

Score-like blocks are [b, n, rows, columns] in the accumulation dtype: fp32, or fp64 for fp64 inputs. For a product
with k or v, the query heads of one head are stacked along the rows, so that k and v are never repeated.

The gradients of a row's scores sum to 0: from those of its weights, their mean is subtracted. FlashAttention takes it
from the output, which in half precision is rounded, as a gradient may be too. Where one key has nearly all the weight
(an attention sink), its gradient and the mean are nearly equal, and what remains would be that rounding: with a score
of 11 on the first of 300 tokens the gradients of q and k were 15 % off, with 20 by a multiple of themselves. So in half
precision the blocks of a row are held until all are there, and what they sum to is taken off: `centre_`. That costs a
twentieth of the backward pass, and memory of two numbers for each key and query of a block.
"""

import math
from typing import Dict, Hashable, Optional, Tuple

import torch

from megatron.model.attention.core.spec import Range


class Scratch:
    """Uninitialised memory by name, the same for each block: fresh memory would cost the CPU a fifth of the time."""

    def __init__(self, like: torch.Tensor):
        self._like = like
        self._memory: Dict[Hashable, torch.Tensor] = {}

    def __call__(self, name: Hashable, shape, dtype: torch.dtype) -> torch.Tensor:
        size, memory = math.prod(shape), self._memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self._memory[name] = self._like.new_empty(size, dtype=dtype)
        return memory[:size].view(shape)


class BlockProducts:
    """q [s, b, n, d], k [t, b, m', d] and v [t, b, m, d] cut into blocks; scale is that of the scores."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float):
        self.batch, self.heads, self.key_heads, self.value_heads = q.shape[1], q.shape[2], k.shape[2], v.shape[2]
        self.half = q.dtype in (torch.float16, torch.bfloat16)
        self.dtype = torch.float32 if self.half else q.dtype
        self._on_cuda = q.device.type == "cuda"
        self._q = q.permute(1, 2, 0, 3)  # [b, n, s, d]
        self._k = self._stacked(k.permute(1, 2, 0, 3), self.key_heads)  # [b·m', t, d]
        self._v = self._stacked(v.permute(1, 2, 0, 3), self.value_heads)  # [b·m, t, d]
        # torch has half-precision products with an fp32 result on CUDA only, and rounded scores are worth little
        # against an exact log-sum-exp: a score of 1000 would be off by 2.
        self._scale, self._narrow_scores = scale, self.half and self._on_cuda
        self._score_keys = self._k if self._narrow_scores else self._k.to(self.dtype) * scale
        self._scratch = Scratch(k)

    def queries(self, rows: Range) -> torch.Tensor:
        """[b·m', (n/m')·rows, d]"""
        return self._stacked(self._q[:, :, slice(*rows)], self.key_heads)

    def for_scores(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries as `scores` takes them."""
        return queries.to(self._score_keys.dtype)

    def of_values(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, n, rows, d] as the products with v take it: [b·m, (n/m)·rows, d]."""
        return self._stacked(x, self.value_heads)

    def hold(self, name: Hashable, x: torch.Tensor) -> torch.Tensor:
        """A copy of the block in the dtype of the inputs, in the memory of this name."""
        return self.scratch(name, x.shape, self._k.dtype).copy_(x)

    def zeros(self, rows: Range, width: int) -> torch.Tensor:
        """[b, n, rows, width], to sum in."""
        return self._k.new_zeros(self.batch, self.heads, rows[1] - rows[0], width, dtype=self.dtype)

    def scores(self, queries: torch.Tensor, columns: Range) -> torch.Tensor:
        """Scaled scores [b, n, rows, columns]; queries: see for_scores."""
        scores = self._by_heads(self._product("scores", queries, self._score_keys[:, slice(*columns)].mT))
        return scores.mul_(self._scale) if self._narrow_scores else scores

    def add_context(self, context: torch.Tensor, weights: torch.Tensor, columns: Range) -> None:
        """context [b, n, rows, d] += weights · v"""
        weights = self._stacked(self._narrow(weights), self.value_heads)
        self._add_product(self._stacked(context, self.value_heads), weights, self._v[:, slice(*columns)])

    def weight_gradients(self, upstream: torch.Tensor, columns: Range) -> torch.Tensor:
        """upstream (see of_values) · v^T: [b, n, rows, columns]."""
        gradient = self._product("gradient", upstream, self._v[:, slice(*columns)].mT)
        return self._by_heads(gradient)

    def add_value_gradient(self, total: torch.Tensor, weights, upstream: torch.Tensor, columns: Range) -> None:
        """total [b·m, t, d] += weights^T · upstream, in the rows of these keys."""
        weights = self._stacked(self._narrow(weights), self.value_heads)
        self._add_product(total[:, slice(*columns)], weights.mT, upstream)

    def add_query_and_key_gradients(self, query_sum, key_sum, gradient, queries, columns: Range) -> None:
        """query_sum [b, n, rows, d] += gradient · k and key_sum [b·m', t, d] += gradient^T · q, both unscaled."""
        gradient = self._stacked(self._narrow(gradient), self.key_heads)
        self._add_product(self._stacked(query_sum, self.key_heads), gradient, self._k[:, slice(*columns)])
        self._add_product(key_sum[:, slice(*columns)], gradient.mT, queries)

    def key_and_value_sums(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Zeros [b·m', t, d] and [b·m, t, d], to sum gradients in."""
        return torch.zeros_like(self._k, dtype=self.dtype), torch.zeros_like(self._v, dtype=self.dtype)

    def scratch(self, name: Hashable, shape, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """See Scratch; by default in the accumulation dtype."""
        return self._scratch(name, shape, dtype or self.dtype)

    def _stacked(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """[b, n, rows, c] -> [b·heads, (n/heads)·rows, c]"""
        return x.reshape(self.batch * heads, -1, x.shape[-1])

    def _by_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self.batch, self.heads, -1, x.shape[-1])

    def _narrow(self, x: torch.Tensor) -> torch.Tensor:
        """In the dtype of the inputs."""
        return self.scratch("narrow", x.shape, self._k.dtype).copy_(x) if self.half else x

    def _product(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a · b in the accumulation dtype."""
        shape = (a.shape[0], a.shape[1], b.shape[2])
        if a.dtype == self.dtype:
            return torch.bmm(a, b, out=self.scratch(name, shape))
        if self._on_cuda:
            return torch.bmm(a, b, out_dtype=self.dtype)
        return self.scratch(name, shape).copy_(torch.bmm(a, b, out=self.scratch("half", shape, a.dtype)))

    def _add_product(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """total += a · b; total is in the accumulation dtype."""
        if a.dtype == self.dtype:
            total.baddbmm_(a, b)
        elif self._on_cuda:
            total.add_(torch.bmm(a, b, out_dtype=self.dtype))
        else:
            total.add_(torch.bmm(a, b, out=self.scratch("half", total.shape, a.dtype)))


def centre_(gradient: torch.Tensor, weights: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The gradients of scores, in place, less what their row's sum was off from 0: to each belongs its weight of it.

    gradient and weights [b, n, rows, columns] are in the dtype of the inputs, rest [b, n, rows, 1] is in fp32.
    """
    high = rest.to(weights.dtype)
    low = (rest - high).to(weights.dtype)  # of a weight of 1, whose gradient is all that is high
    return gradient.addcmul_(weights, high, value=-1).addcmul_(weights, low, value=-1)


def unstacked(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[b·m, t, d] -> [t, b, m, d], in the dtype of `like`."""
    return x.view(like.shape[1], like.shape[2], *x.shape[1:]).permute(2, 0, 1, 3).to(like.dtype)
