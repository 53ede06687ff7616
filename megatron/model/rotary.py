"""Rotary position embeddings (Su et al. 2021, RoFormer), and the scalings that stretch them to longer texts."""

import math
from typing import Optional, Tuple, Union
from weakref import WeakValueDictionary

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.neox_arguments.layer_attention import RotarySettings
from megatron.neox_arguments.rope_scaling import RopeScaling


def rotary_inv_freq(rotary_ndims: int, base: Union[float, torch.Tensor]) -> torch.Tensor:
    """Angular frequencies [r/2] in fp32: base^(-2i/r) (Su et al. 2021, RoFormer, section 3.2.2).

    The exponents run over the rotated dimensions r, not over head_dim.
    """
    return 1.0 / _wavelengths(rotary_ndims, base)


def rotary_frequencies(settings: RotarySettings, length: Optional[int] = None) -> Tuple[torch.Tensor, float]:
    """(angular frequencies [r/2] in fp32, factor on cosine and sine) for a text of `length` tokens.

    Only dynamic and longrope ask for the length; None is a text of all `settings.positions`.
    """
    scaling = settings.scaling
    if scaling is None:
        return rotary_inv_freq(settings.ndims, settings.base), 1.0
    length = settings.positions if length is None else length
    return _SCALED[scaling.rope_type](scaling, settings.ndims, settings.base, length), scaling.attention_factor


def _wavelengths(rotary_ndims: int, base: Union[float, torch.Tensor]) -> torch.Tensor:
    """base^(2i/r), [r/2] in fp32: the tokens in which pair i turns by one radian."""
    exponents = torch.arange(0, rotary_ndims, 2, dtype=torch.float32, device="cpu") / rotary_ndims
    return base**exponents


def _linear(scaling: RopeScaling, ndims: int, base: float, length: int) -> torch.Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return rotary_inv_freq(ndims, base) / scaling.factor


def _dynamic(scaling: RopeScaling, ndims: int, base: float, length: int) -> torch.Tensor:
    """A larger base, such that the slowest pair is stretched by as much as the text is too long.

    In fp32 and this order because transformers' model does; at 50 radians another last digit is 2e-6 in the tables.
    """
    original = scaling.original_max_position_embeddings
    running = torch.tensor(max(length, original), device="cpu")
    growth = scaling.factor * running / original - (scaling.factor - 1)
    return rotary_inv_freq(ndims, base * growth ** (ndims / (ndims - 2)))


def _llama3(scaling: RopeScaling, ndims: int, base: float, length: int) -> torch.Tensor:
    """Pairs that turn fewer than low_freq_factor times in the original length are slowed down by the factor, those
    that turn more than high_freq_factor times are left, those between are mixed."""
    inv_freq = rotary_inv_freq(ndims, base)
    turns = scaling.original_max_position_embeddings / (2 * math.pi / inv_freq)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * inv_freq / scaling.factor + kept * inv_freq


def _yarn(scaling: RopeScaling, ndims: int, base: float, length: int) -> torch.Tensor:
    """Peng et al. 2023, section 3.2: pairs that turn more than beta_fast times in the original length are left, those
    that turn fewer than beta_slow times are slowed down by the factor, with a ramp between."""
    first, last = (_pair_that_turns(times, scaling, ndims, base) for times in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, ndims - 1)
    if first == last:
        last += 0.001  # a ramp of no width would be 0 / 0
    slowed = (torch.arange(ndims // 2, dtype=torch.float32, device="cpu") - first) / (last - first)
    kept = 1 - slowed.clamp(0, 1)
    wavelengths = _wavelengths(ndims, base)
    return (1 - kept) / (scaling.factor * wavelengths) + kept / wavelengths


def _pair_that_turns(times: float, scaling: RopeScaling, ndims: int, base: float) -> float:
    """The pair i, a fraction, for which original length / (2 pi base^(2i/r)) is `times`."""
    radians = times * 2 * math.pi
    return ndims * math.log(scaling.original_max_position_embeddings / radians) / (2 * math.log(base))


def _longrope(scaling: RopeScaling, ndims: int, base: float, length: int) -> torch.Tensor:
    """Ding et al. 2024: a factor found by search for each pair, of two sets."""
    is_long = length > scaling.original_max_position_embeddings
    factors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor, dtype=torch.float32, device="cpu")
    return 1.0 / (factors * _wavelengths(ndims, base))


def _proportional(scaling: RopeScaling, ndims: int, base: float, length: int) -> torch.Tensor:
    """Gemma 4's: the first pairs turn as in a head rotated whole, the others do not turn. Pair i is still dimensions i
    and i + r/2, so this is no rotation of the first dimensions of a head, as rotary_pct is."""
    inv_freq = rotary_inv_freq(ndims, base) / scaling.factor
    inv_freq[scaling.rotated_pairs(ndims) :] = 0.0
    return inv_freq


_SCALED = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first r dimensions of x [s, b, n, d]; cos and sin are [s, 1, 1, r/2].

    Half split, as GPT-NeoX and Hugging Face have it: dimension i is paired with i + r/2.
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class RotaryEmbedding(nn.Module):
    """Rotates queries or keys by their position. Tables are made in fp32 and used in the tensor's dtype; layers with
    equal settings share them.

    Where the scaling depends on the length of the text (dynamic, longrope), that is the last position of the call
    plus 1, as in transformers: seq_length in training, and all tokens so far in generation. It depends on nothing
    else; transformers' dynamic also remembers longer texts it saw before. Keys in a KV cache keep the rotation of
    their own step. With dynamic the frequencies drift a little with each token beyond the original length, so a cached
    generation differs from a recomputed one there, as it does in transformers. With longrope they change once and
    altogether: a call that continues a cache across the original length is refused (transformers' Phi-3 runs the whole
    text again instead).

    buffer_dtype: keep the frequencies as a buffer `inv_freq` of this dtype, because GPT-NeoX's checkpoints can have
    one (rotary_save_freqs_buffer). It is written and read but not used: rounded frequencies would ruin the tables.
    """

    pieces = ("rotate",)
    rotate = staticmethod(rotate)

    def __init__(self, settings: RotarySettings, buffer_dtype: Optional[torch.dtype] = None):
        super().__init__()
        self.settings = settings
        self.seq_length = settings.positions
        if buffer_dtype is not None:
            self.register_buffer("inv_freq", rotary_frequencies(settings)[0].to(buffer_dtype))
        self._tables = _shared_tables(settings)

    def forward(self, x: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """x [s, b, n, d] at positions offset, offset + 1, ... Raises ConfigError beyond seq_length, and where longrope
        would change the frequencies under the keys of a cache."""
        end = offset + x.shape[0]
        if end > self.seq_length:
            raise ConfigError(
                f"seq_length={self.seq_length}: rotary positions reach {end}; raise seq_length or shorten the input"
            )
        scaling = self.settings.scaling
        if scaling is not None and scaling.rope_type == "longrope" and 0 < offset <= scaling.length_threshold < end:
            raise ConfigError(
                f"rope_scaling of type longrope changes all frequencies beyond {scaling.length_threshold} tokens, and "
                f"the KV cache holds {offset} keys rotated by the others; set recompute=True, or start the cache again "
                "with the whole text"
            )
        cos, sin = self._tables.rows(offset, end, x.device, x.dtype)
        return self.rotate(x, cos, sin)


class _Tables:
    """Cosines and sines of one RotarySettings, per device and dtype."""

    def __init__(self, settings: RotarySettings):
        self.settings = settings
        self._whole = {}
        self._latest = (None, None)

    def rows(self, offset: int, end: int, device: torch.device, dtype: torch.dtype) -> Tuple[torch.Tensor, ...]:
        """(cos, sin), each [end - offset, 1, 1, r/2], for a text of `end` tokens."""
        scaling = self.settings.scaling
        is_beyond = scaling is not None and scaling.length_threshold is not None and end > scaling.length_threshold
        if is_beyond and scaling.rope_type == "dynamic":
            key = (offset, end, device, dtype)  # a new table for each length: only what is asked for, for all layers
            if self._latest[0] != key:
                self._latest = (key, self._make(offset, end, end, device, dtype))
            return self._latest[1]
        key = (is_beyond, device, dtype)
        if key not in self._whole:
            self._whole[key] = self._make(0, self.settings.positions, end, device, dtype)
        return tuple(table[offset:end] for table in self._whole[key])

    def _make(self, first: int, last: int, length: int, device, dtype) -> Tuple[torch.Tensor, ...]:
        with torch.inference_mode(False):  # an inference tensor could not serve a later training step
            inv_freq, factor = rotary_frequencies(self.settings, length)
            positions = torch.arange(first, last, dtype=torch.float32, device="cpu")
            angles = positions[:, None, None, None] * inv_freq
            return tuple((table * factor).to(device, dtype) for table in (angles.cos(), angles.sin()))


_SHARED: "WeakValueDictionary[RotarySettings, _Tables]" = WeakValueDictionary()


def _shared_tables(settings: RotarySettings) -> _Tables:
    """The tables of these settings, made once for as long as a layer uses them."""
    tables = _SHARED.get(settings)
    if tables is None:
        tables = _SHARED[settings] = _Tables(settings)
    return tables
