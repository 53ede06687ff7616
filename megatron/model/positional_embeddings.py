"""Position biases that act inside attention: ALiBi, and T5's relative bias.

Rotary positions are in rotary.py; learned and sinusoidal ones, added to the word embedding, in word_embeddings.py.
"""

import math
from typing import List, Optional

import torch
from torch import nn

from megatron import mpu


def alibi_slopes(heads: int) -> List[float]:
    """One slope per head: 2^(-8i/heads) for a power of two (Press et al. 2022, ALiBi, section 3).

    For other head counts, the slopes of the power of two below, then every other one of the power of two above: the
    authors' published rule.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    if power == heads:
        return slopes
    return slopes + alibi_slopes(2 * power)[0::2][: heads - power]


class AliBi(nn.Module):
    """Bias -slope·(i - j) on the scores of this rank's heads, of the `heads` of a layer with num_attention_heads."""

    def __init__(self, num_attention_heads: int, heads: Optional[range] = None):
        super().__init__()
        heads = range(num_attention_heads) if heads is None else heads
        per_rank = mpu.divide(len(heads), mpu.get_model_parallel_world_size())
        first = heads.start + per_rank * mpu.get_model_parallel_rank()
        self._slopes = alibi_slopes(num_attention_heads)[first : first + per_rank]
        # For GPT-NeoX's checkpoint format only: the buffer takes the dtype of the model, the bias does not.
        self.register_buffer("slopes", torch.tensor(self._slopes))

    def forward(self, query_tokens: int, key_tokens: int, offset: int, device: torch.device) -> torch.Tensor:
        """[n, s, t] in fp32; 0 above the diagonal, where the mask hides the key anyway."""
        slopes = torch.tensor(self._slopes, device=device)[:, None, None]
        return -slopes * _tokens_back(query_tokens, key_tokens, offset, device)


class ParallelRelativePositionBias(nn.Module):
    """T5's learned bias per head and distance bucket, one module for all layers; heads are split over ranks."""

    def __init__(self, neox_args, num_attention_heads: int):
        super().__init__()
        self.num_buckets = neox_args.rpe_num_buckets
        self.max_distance = neox_args.rpe_max_distance
        shape = (self.num_buckets, num_attention_heads)
        self.weight = mpu.create_parameter(neox_args, shape, nn.init.xavier_normal_, partition_dim=1)  # [buckets, n]

    def forward(self, query_tokens: int, key_tokens: int, offset: int, device: torch.device) -> torch.Tensor:
        """[n, s, t] in the weight's dtype."""
        distance = _tokens_back(query_tokens, key_tokens, offset, device)
        buckets = relative_position_bucket(distance, self.num_buckets, self.max_distance)
        return self.weight[buckets].permute(2, 0, 1)


def relative_position_bucket(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Bucket of each distance to an earlier token (Raffel et al. 2020, T5, section 2.1; unidirectional).

    Half of the buckets hold one distance each, the others grow logarithmically up to max_distance; all beyond share
    the last one.
    """
    exact = num_buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    logarithmic = exact + (growth * (num_buckets - exact)).long()
    return torch.where(distance < exact, distance, logarithmic.clamp(max=num_buckets - 1))


def _tokens_back(query_tokens: int, key_tokens: int, offset: int, device: torch.device) -> torch.Tensor:
    """How many tokens key j lies before query i + offset: int64 [s, t], 0 for keys after it."""
    positions = torch.arange(offset, offset + query_tokens, device=device).unsqueeze(1)
    return (positions - torch.arange(key_tokens, device=device)).clamp(min=0)
