"""What `TEMultiheadAttention` (te_mha) needs beside its call of Transformer Engine: widths, scale, cache, refusals.

Transformer Engine is imported where it is used: the arguments are checked without it.
"""

from typing import Callable, List, Optional, Tuple

import torch

from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry
from megatron.head_dim.config import head_geometry

WITH_A_MASK_OF_THEIR_OWN = ("local", "sparse_fixed", "sparse_variable", "bigbird", "bslongformer")


def problems(neox_args) -> List[str]:
    """Settings that Transformer Engine's attention would ignore without a word; none if it is not asked for."""
    if not (getattr(neox_args, "te_mha", False) or getattr(neox_args, "te_fp8_mha", False)):
        return []
    found = []
    if neox_args.pos_emb in ("alibi", "rpe"):
        found.append(f"pos_emb={neox_args.pos_emb}: not added to the scores by te_mha; set te_mha: false")
    if neox_args.use_qk_layernorm or neox_args.qk_norm_type is not None:
        found.append(
            f"use_qk_layernorm={neox_args.use_qk_layernorm}, qk_norm_type={neox_args.qk_norm_type}: te_mha does not "
            "normalise queries and keys; set te_mha: false"
        )
    masked = sorted({kind for kind in neox_args.attention_config or () if kind in WITH_A_MASK_OF_THEIR_OWN})
    if masked:
        found.append(f"attention_config: te_mha ignores {', '.join(masked)}; use global, or set te_mha: false")
    return found


def geometry(neox_args) -> HeadGeometry:
    """The widths of the whole layer. Raises ConfigError with all `problems`, or those of the widths."""
    found = problems(neox_args)
    if found:
        raise ConfigError(found)
    return head_geometry(neox_args)


def normalization(neox_args) -> Tuple[str, float]:
    """Transformer Engine's name of the norm, and its epsilon. Of use only with input_layernorm."""
    from megatron.model.norms import get_norm

    return "RMSNorm" if "rmsnorm" in neox_args.norm else "LayerNorm", get_norm(neox_args)[1]


def window_size(neox_args) -> Tuple[int, int]:
    """How many tokens before a query, and after it, are seen; -1: all."""
    return (-1 if neox_args.sliding_window_width is None else neox_args.sliding_window_width, 0)


def configure(attention, neox_args, parallel_output: bool, use_cache: bool) -> None:
    """What the constructor of `MultiheadAttention` has no argument for; called right after it.

    parallel_output: the layer sums over the tensor-parallel ranks (gpt_j_residual), so the projection must not.
    use_cache: as in ParallelSelfAttention; the model's inference_mode switches it.
    """
    attention.use_cache = use_cache
    if parallel_output:
        attention.proj.parallel_mode = None  # its weight is a rank's share already; left are a product and no sum
        attention.proj.sequence_parallel = False
    if neox_args.softmax_scale is not None:
        attention.core_attention = _core(attention, neox_args)


def _core(attention, neox_args):
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_attention_heads=attention.num_attention_heads,
        kv_channels=attention.hidden_size_per_attention_head,
        num_gqa_groups=attention.num_gqa_groups,
        attention_dropout=neox_args.attention_dropout,
        qkv_format=attention.qkv_format,
        tp_size=attention.tp_size,
        tp_group=attention.tp_group,
        get_rng_state_tracker=attention.get_rng_state_tracker,
        sequence_parallel=attention.sequence_parallel,
        layer_number=attention.layer_number,
        attention_type=attention.attention_type,
        softmax_scale=neox_args.softmax_scale,
    )


def cached(attention, forward: Callable, layer_past: Optional[torch.Tensor]) -> Callable:
    """`forward` of Transformer Engine's class as one of ParallelSelfAttention: with a cache, and None for no bias.

    layer_past [2, t, b, m, d]: keys (rotated) and values of the tokens before, m being the key/value heads of a rank.
    The returned function gives (output [s, b, h], bias [h] or None), or with use_cache ([output, present], bias).
    """

    def attend(hidden_states, *args, rotary_pos_emb=None, **kwargs):
        cache = _Cache(layer_past if attention.use_cache else None)
        if rotary_pos_emb is not None:
            attention.rope_emb = rotary_pos_emb = rotary_pos_emb.to(hidden_states.device)
            rotary_pos_emb = rotary_pos_emb[cache.length :]
        hook = None
        if attention.use_cache:
            hook = attention.core_attention.register_forward_pre_hook(cache.extend, with_kwargs=True)
        try:
            output, bias = forward(hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
        bias = bias if attention.proj.use_bias else None
        return ([output, cache.present] if attention.use_cache else output), bias

    return attend


class _Cache:
    """Keys and values before those of a step, put in front of them on their way into the core."""

    def __init__(self, past: Optional[torch.Tensor]):
        self.past = past if past is not None and past.numel() > 0 else None
        self.length = 0 if self.past is None else self.past.shape[1]
        self.present = None

    def extend(self, core, inputs, kwargs):
        """A forward pre-hook of DotProductAttention, called with (query, key, value)."""
        query, key, value = inputs
        if self.past is not None:
            key, value = torch.cat((self.past[0], key)), torch.cat((self.past[1], value))  # [t, b, m, d]
            if kwargs["attn_mask_type"] == "causal":  # which would take the first query for the first token
                kwargs = dict(kwargs, attn_mask_type="causal_bottom_right")
        self.present = torch.stack((key, value))  # [2, t, b, m, d]
        return (query, key, value), kwargs
