"""How cached keys and values are stored: as they are, as 8-bit floats, or as 8-bit whole numbers with scales.

A format turns x [t, b, heads, d] into parts, one tensor [t, b, heads, width] each, and back.
"""

import functools
from typing import Optional, Tuple

import torch

Parts = Tuple[torch.Tensor, ...]

FP8_MAX = 448.0
"""Largest finite number of e4m3 (Micikevicius et al. 2022, arXiv:2209.05433, table 1)."""
INT8_MAX = 127


class ModelFormat:
    """The numbers themselves, in the model's dtype."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def parts(self, head_dim: int) -> Tuple[Tuple[int, torch.dtype], ...]:
        """(width, dtype) of each part."""
        return ((head_dim, self.dtype),)

    def encode(self, x: torch.Tensor) -> Parts:
        return (x,)

    def decode(self, parts: Parts) -> torch.Tensor:
        return parts[0]


class Float8Format(ModelFormat):
    """e4m3: rounded to nearest, saturating at 448. Infinities become NaN, so that an overflow stays visible."""

    def parts(self, head_dim: int) -> Tuple[Tuple[int, torch.dtype], ...]:
        return ((head_dim, torch.float8_e4m3fn),)

    def encode(self, x: torch.Tensor) -> Parts:
        # What the cast alone does beyond 448 (NaN or saturation) differs between versions and devices of torch.
        finite = x.clamp(-FP8_MAX, FP8_MAX).masked_fill(x.isinf(), float("nan"))
        return (finite.to(torch.float8_e4m3fn),)

    def decode(self, parts: Parts) -> torch.Tensor:
        codes = parts[0]
        if codes.device.type != "cpu":
            return codes.to(self.dtype)
        if torch.compiler.is_compiling():
            return _float8_values(codes).to(self.dtype)
        table = _float8_table(self.dtype)  # 10 x faster on the CPU than the cast
        return table.index_select(0, codes.view(torch.uint8).int().flatten()).view(codes.shape)


def _float8_values(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 -> fp32 by arithmetic, of which inductor makes a loop over vectors, and of the cast it does not.

    The 7 bits below the sign are those of an fp32 number that is 2^120 times smaller; all ones is NaN.
    """
    bits = codes.view(torch.uint8).int()
    low = bits & 0x7F
    size = (low << 20).view(torch.float32) * 2.0**120
    return torch.where(low == 0x7F, torch.nan, torch.where(bits == low, size, -size))


@functools.cache
def _float8_table(dtype: torch.dtype) -> torch.Tensor:
    """The value of each code."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)


class Int8Format(ModelFormat):
    """Whole numbers from -127 to 127 times one fp32 scale per token and head, the largest magnitude / 127."""

    def parts(self, head_dim: int) -> Tuple[Tuple[int, torch.dtype], ...]:
        return ((head_dim, torch.int8), (1, torch.float32))

    def encode(self, x: torch.Tensor) -> Parts:
        x = x.float()
        scale = x.abs().amax(dim=-1, keepdim=True) / INT8_MAX  # [t, b, heads, 1]
        steps = (x / scale.masked_fill(scale == 0, 1.0)).round().clamp(-INT8_MAX, INT8_MAX)
        return steps.to(torch.int8), scale

    def decode(self, parts: Parts) -> torch.Tensor:
        steps, scale = parts
        return (steps.float() * scale).to(self.dtype)  # a scale that is not finite makes the whole row NaN


_FORMATS = {None: ModelFormat, "fp8_e4m3": Float8Format, "int8": Int8Format}
"""By the values of kv_cache_dtype."""


def cache_format(kv_cache_dtype: Optional[str], dtype: torch.dtype) -> ModelFormat:
    """The format that kv_cache_dtype names; what is read from it has `dtype`."""
    return _FORMATS[kv_cache_dtype](dtype)


def bytes_per_head(form: ModelFormat, head_dim: int) -> int:
    """Bytes of one token's keys (or values) of one head, scale included."""
    return sum(width * dtype.itemsize for width, dtype in form.parts(head_dim))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """x for operations that know nothing of 8-bit floats and only move them."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


class TokenRing:
    """The last `capacity` tokens, [capacity, b, heads, d] in a format; token i of the sequence is in slot i % capacity.

    Tokens that have been overwritten cannot be asked for: the caller knows how far back it needs to see.
    """

    def __init__(self, form: ModelFormat, capacity: int, shape: Tuple[int, int, int], device: torch.device):
        """shape: (batch, heads, head_dim). Allocates everything."""
        batch, heads, head_dim = shape
        self.shape = shape
        self.capacity = capacity
        self._format = form
        self.parts = tuple(
            torch.empty(capacity, batch, heads, width, dtype=dtype, device=device)
            for width, dtype in form.parts(head_dim)
        )

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(part.nbytes for part in self.parts)

    def put(self, start: int, x: torch.Tensor) -> torch.Tensor:
        """Store x [s, b, heads, d] as tokens start, start + 1, ...; return all that is stored, in the order of slots.

        x must not reach beyond the end of the ring.
        """
        first = start % self.capacity
        for part, new in zip(self.parts, self._format.encode(x), strict=True):
            part[first : first + len(new)] = new
        stored = min(start + len(x), self.capacity)
        return self._format.decode(tuple(part[:stored] for part in self.parts))

    def put_one(self, slot: torch.Tensor, x: torch.Tensor, stored: int) -> torch.Tensor:
        """`put` of one token x [1, b, heads, d] in a slot, int64 [1]; return what is in the first `stored` slots.

        The slot is no number, and nothing depends on it: a compiled step serves every token.
        """
        for part, new in zip(self.parts, self._format.encode(x), strict=True):
            _bits(part).index_copy_(0, slot, _bits(new.to(part.dtype)))
        return self._format.decode(tuple(part[:stored] for part in self.parts))

    def extend(self, oldest: int, start: int, x: torch.Tensor) -> torch.Tensor:
        """Return tokens oldest .. start - 1 and x [s, b, heads, d] behind them, in order; store the last of them."""
        extended = []
        for part, new in zip(self.parts, self._format.encode(x), strict=True):
            past = [part[slots] for slots in self._slots(oldest, start)]
            extended.append(torch.cat([*past, new.to(part.dtype)]) if past else new)
            self._store_last(part, start, new)
        return self._format.decode(tuple(extended))

    def _store_last(self, part: torch.Tensor, start: int, new: torch.Tensor) -> None:
        """Write those of the tokens `new`, start and after, that nothing in `new` overwrites again."""
        skipped = max(0, len(new) - self.capacity)
        rest = new[skipped:]
        for slots in self._slots(start + skipped, start + len(new)):
            count = slots.stop - slots.start
            part[slots], rest = rest[:count], rest[count:]

    def _slots(self, first: int, stop: int) -> Tuple[slice, ...]:
        """Where the tokens first .. stop - 1 are, in order: up to two pieces."""
        if first == stop:
            return ()
        begin, end = first % self.capacity, (stop - 1) % self.capacity + 1
        if begin < end:
            return (slice(begin, end),)
        return slice(begin, self.capacity), slice(0, end)
