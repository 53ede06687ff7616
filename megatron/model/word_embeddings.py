"""Token and absolute position embeddings: the first layer of the model."""

from typing import Optional, Tuple

import torch

from megatron import mpu
from megatron.errors import ConfigError


class Embedding(torch.nn.Module):
    """Sum of the token embedding and, for pos_emb learned or sinusoidal, the position embedding, then dropout.

    embedding_multiplier acts on the token embedding before positions are added, as in Vaswani et al. 2017 (sections
    3.4 and 3.5) and in Hugging Face's models that have both.
    Under sequence_parallel the result is this rank's piece of the sequence.
    """

    def __init__(self, neox_args, init_method):
        super().__init__()
        self.sequence_parallel = neox_args.sequence_parallel
        self.dropout = neox_args.hidden_dropout
        self.multiplier = _rounded(neox_args.embedding_multiplier, neox_args.params_dtype)
        self.word_embeddings = mpu.VocabParallelEmbedding(
            neox_args, neox_args.padded_vocab_size, neox_args.hidden_size, init_method=init_method
        )
        if neox_args.pos_emb == "learned":
            self.position_embeddings = LearnedPositions(neox_args, init_method)
        elif neox_args.pos_emb == "sinusoidal":
            self.position_embeddings = SinusoidalPositions(neox_args.hidden_size, neox_args.opt_pos_emb_offset)
        else:
            self.position_embeddings = None

    @property
    def word_embeddings_weight(self) -> torch.nn.Parameter:
        """[v/p, h]: what a tied output layer shares."""
        return self.word_embeddings.weight

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """tokens, position_ids [b, s] int64 -> [b, s, h], or [b, s/p, h] under sequence_parallel."""
        hidden = self.word_embeddings(tokens)  # [b, s, h]
        if self.sequence_parallel:
            hidden = mpu.scatter_to_sequence_parallel_region(hidden, seq_dim=1)  # [b, s/p, h]
            position_ids = mpu.scatter_to_sequence_parallel_region(position_ids, seq_dim=1)
        if self.multiplier is not None:
            hidden = hidden * self.multiplier
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids).to(hidden.dtype)
        return self._dropout(hidden)

    def _dropout(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.training or self.dropout == 0.0:
            return hidden
        if not self.sequence_parallel:
            return torch.nn.functional.dropout(hidden, self.dropout)
        with mpu.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(hidden, self.dropout)


def _rounded(number: Optional[float], dtype: torch.dtype) -> Optional[float]:
    """As a tensor of this dtype would hold it: Gemma was trained with sqrt(3072) as 55.5 in bfloat16."""
    return None if number is None else torch.tensor(number, dtype=torch.float32, device="cpu").to(dtype).item()


class EmbeddingPipe(Embedding):
    """Embedding that takes the pipeline's input tuple."""

    def forward(self, batch: Tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(tokens [b, s], position_ids [b, s]) -> [b, s, h]."""
        tokens, position_ids = batch
        return super().forward(tokens, position_ids)


class LearnedPositions(torch.nn.Module):
    """A table [max_position_embeddings, h], replicated. Position i reads row i + opt_pos_emb_offset."""

    def __init__(self, neox_args, init_method):
        super().__init__()
        self.offset = neox_args.opt_pos_emb_offset
        self.sequence_parallel = neox_args.sequence_parallel
        rows, needed = neox_args.max_position_embeddings, neox_args.seq_length + self.offset
        if needed > rows:
            raise ConfigError(
                f"max_position_embeddings={rows} is too small for seq_length={neox_args.seq_length} with "
                f"opt_pos_emb_offset={self.offset}: raise it to {needed}"
            )
        self.weight = mpu.create_parameter(neox_args, (rows, neox_args.hidden_size), init_method)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """[b, s] -> [b, s, h]."""
        weight = self.weight
        if self.sequence_parallel:
            weight = mpu.copy_weight_to_sequence_parallel_region(weight)
        return torch.nn.functional.embedding(position_ids + self.offset, weight)


class SinusoidalPositions(torch.nn.Module):
    """[sin(i w_k), cos(i w_k)] with w_k = 10000^(-2k/h) (Vaswani et al. 2017, section 3.5, all sines first).

    The buffer inv_freq holds the w_k because checkpoints have it. The angles are not computed from it: DeepSpeed casts
    buffers to the model's precision, and in half precision late positions would be off by more than a radian.
    """

    def __init__(self, hidden_size: int, offset: int = 0):
        super().__init__()
        self.hidden_size = hidden_size
        self.offset = offset
        self.register_buffer("inv_freq", self._frequencies(mpu.current_device()))

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """[b, s] -> [b, s, h] in fp32."""
        frequencies = self._frequencies(position_ids.device)
        angles = (position_ids + self.offset).float().unsqueeze(-1) * frequencies  # [b, s, ceil(h/2)]
        return torch.cat((angles.sin(), angles.cos()), dim=-1)[..., : self.hidden_size]

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        """w_k in fp32, [ceil(h/2)]."""
        exponents = torch.arange(0, self.hidden_size, 2, dtype=torch.float32, device=device) / self.hidden_size
        return 10000.0**-exponents
