"""What a kernel is asked for, before anything is built."""

from dataclasses import dataclass
from typing import Optional

import torch

from megatron.geometry import HeadGeometry


@dataclass(frozen=True)
class AttentionRequest:
    """One layer's attention on one rank. Kernels answer it with `refusal`.

    geometry: the rank's share. window: tokens beside the query itself, None for no window. softcap: see
    attn_logit_softcap. score_bias: a bias is added to the scores (its setting, e.g. "pos_emb=alibi"; None if not).
    dropout_p: on the probabilities, 0 for a model that will not be trained. tokens: the longest sequence. what: names
    it in messages.
    """

    geometry: HeadGeometry
    dtype: torch.dtype
    device: torch.device
    window: Optional[int] = None
    softcap: Optional[float] = None
    score_bias: Optional[str] = None
    dropout_p: float = 0.0
    tokens: int = 1
    what: str = "this model"

    @classmethod
    def of_layer(cls, neox_args, layer_number: int, partition: HeadGeometry, device: torch.device):
        """The request of a layer (0-based) of a model; partition is this rank's geometry."""
        layer = neox_args.layer_attention(layer_number)
        return cls(
            geometry=partition,
            dtype=neox_args.params_dtype,
            device=device,
            window=layer.window,
            softcap=layer.logit_softcap,
            score_bias=f"pos_emb={neox_args.pos_emb}" if neox_args.pos_emb in ("alibi", "rpe") else None,
            dropout_p=neox_args.attention_dropout if neox_args.optimizer is not None else 0.0,
            tokens=neox_args.seq_length,
            what="this model" if neox_args.has_uniform_heads else f"layer {layer_number}",
        )
