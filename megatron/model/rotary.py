"""Rotary position embeddings (Su et al. 2021, RoFormer)."""

from typing import Optional, Tuple

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.neox_arguments.layer_attention import RotarySettings


def rotary_inv_freq(rotary_ndims: int, base: float) -> torch.Tensor:
    """Angular frequencies [r/2] in fp32: base^(-2i/r) (Su et al. 2021, RoFormer, section 3.2.2).

    The exponents run over the rotated dimensions r, not over head_dim.
    """
    exponents = torch.arange(0, rotary_ndims, 2, dtype=torch.float32, device="cpu") / rotary_ndims
    return 1.0 / (base**exponents)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first r dimensions of x [s, b, n, d]; cos and sin are [s, 1, 1, r/2].

    Half split, as GPT-NeoX and Hugging Face have it: dimension i is paired with i + r/2.
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class RotaryEmbedding(nn.Module):
    """Rotates queries or keys by their position. Tables are made in fp32 and used in the tensor's dtype.

    buffer_dtype: keep the frequencies as a buffer `inv_freq` of this dtype, because GPT-NeoX's checkpoints can have
    one (rotary_save_freqs_buffer). It is written and read but not used: rounded frequencies would ruin the tables.
    """

    def __init__(self, settings: RotarySettings, buffer_dtype: Optional[torch.dtype] = None):
        super().__init__()
        self.seq_length = settings.positions
        inv_freq = rotary_inv_freq(settings.ndims, settings.base)
        if buffer_dtype is not None:
            self.register_buffer("inv_freq", inv_freq.to(buffer_dtype))
        angles = torch.arange(settings.positions, dtype=torch.float32, device="cpu")[:, None, None, None] * inv_freq
        self._cos_sin = (angles.cos(), angles.sin())  # [seq_length, 1, 1, r/2]
        self._converted = {}

    def forward(self, x: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """x [s, b, n, d] at positions offset, offset + 1, ... Raises ConfigError beyond seq_length."""
        end = offset + x.shape[0]
        if end > self.seq_length:
            raise ConfigError(
                f"seq_length={self.seq_length}: rotary positions reach {end}; raise seq_length or shorten the input"
            )
        cos, sin = self._tables(x)
        return rotate(x, cos[offset:end], sin[offset:end])

    def _tables(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        key = (x.device, x.dtype)
        if key not in self._converted:
            with torch.inference_mode(False):  # an inference tensor could not serve a later training step
                self._converted[key] = tuple(table.to(x.device, x.dtype) for table in self._cos_sin)
        return self._converted[key]
