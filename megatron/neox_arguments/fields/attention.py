"""What attention and the block around it can do beyond GPT-NeoX."""

from dataclasses import dataclass
from typing import Literal, Optional, Union


@dataclass
class NeoXArgsAttention:
    """Attention, positions and block options that GPT-NeoX does not have; at their defaults nothing changes."""

    qk_norm_type: Optional[Literal["joint", "per_head", "full_width"]] = None
    """Normalise queries and keys before the rotary embedding, with norms of the kind `norm`. joint: GPT-NeoX's
    `use_qk_layernorm`, one norm for both. per_head: a norm for queries and one for keys, each over one head, with
    weights of shape [head_dim] shared by all heads (Qwen3, Gemma 3). full_width: over all query heads and over all key
    heads together, weights of shape [heads x head_dim] (OLMo 2), the same at every `model_parallel_size`. Null: joint
    if `use_qk_layernorm`, else no norm."""

    v_norm: bool = False
    """Normalise each head of the values by its root mean square over head_dim, without weights and with
    `rms_norm_epsilon` (Gemma 4)."""

    shared_key_value: Union[bool, dict] = False
    """Keys and values are one projection: the QKV weight has no rows for values, which are the keys before their norm
    and rotation (Gemma 4's attention_k_eq_v). A mapping from full_attention and sliding_attention to true or false
    gives each layer type (see `layer_types`) its own; a type that is not in it has projections of both."""

    layer_scalar: bool = False
    """Multiply the output of each layer by a number of its own, residual stream and all (Gemma 4). The number is 1
    unless a checkpoint has another; it is not trained."""

    layer_types: Optional[list] = None
    """full_attention or sliding_attention for each layer, written as `attention_config` is: [[[pattern], repeats],
    ...], "all" to repeat the pattern over all layers (cut off at the last one), or a plain list. Only
    sliding_attention layers have the window of `sliding_window_width`. Null: all of one type, sliding_attention if
    `sliding_window_width` is set."""

    no_rope_layers: Optional[list] = None
    """Layers without rotary positions, as Hugging Face writes it for SmolLM3: a list with 1 for each layer that has
    them and 0 for each that has none. Only for pos_emb rotary. Null: all layers have them."""

    rope_scaling: Optional[dict] = None
    """Change of the rotary frequencies for contexts beyond those of pretraining, as Hugging Face writes it: a mapping
    with rope_type linear, dynamic, llama3, yarn, longrope or proportional and that type's numbers (factor,
    original_max_position_embeddings, ...). A mapping from full_attention and sliding_attention to such mappings gives
    each layer type its own. `max_position_embeddings` is the length after scaling and `seq_length` still the longest
    text; for dynamic, give original_max_position_embeddings here, where Hugging Face has it as the model's
    max_position_embeddings. dynamic and longrope choose the frequencies by the length of the text at hand.
    proportional (Gemma 4) turns the first partial_rotary_factor of the pairs of dimensions as in a head that is rotated
    whole, and the others not at all. rope_theta and, but for that type, partial_rotary_factor may be in it if they
    repeat `rotary_emb_base` and `rotary_pct`. Only for pos_emb rotary. Null: none."""

    rotary_denominator_scale: Optional[float] = None
    """Factor on the denominator of the rotary exponents: pair i of r rotated dimensions turns by base^(-2i / (scale x
    r)) radians per token. These are the first pairs of a head `scale` times as wide, so above 1 every wavelength but
    the first is shorter, and below 1 longer. The same as `rotary_emb_base` to the power 1 / scale, which is what every
    type of `rope_scaling` starts from, and what an export writes. `python -m tools.head_dim wavelengths` shows the
    result. Only for pos_emb rotary. Null: 1."""

    attn_logit_softcap: Optional[float] = None
    """Bound the attention scores smoothly: cap x tanh(score / cap), after the scale and before mask and softmax
    (Gemma 2: 50). Null: no bound."""

    final_logit_softcap: Optional[float] = None
    """Bound the output logits smoothly: cap x tanh(logit / cap), in training and generation (Gemma 2: 30). Null: no
    bound."""

    zero_centered_gamma: bool = False
    """Store the scale of every layernorm and rmsnorm as its difference from 1, so the norm multiplies by 1 + weight
    (Gemma; Megatron's layernorm-1p). Weights start at 0."""

    norm_placement: Literal["pre", "sandwich", "post"] = "pre"
    """Where the norms of a layer stand. pre: before attention and MLP, as in GPT-NeoX. sandwich: before them and also
    on their outputs, ahead of the residual sum (Gemma 2 and 3). post: on their outputs only (OLMo 2). Without
    `gpt_j_residual` unless pre."""

    embedding_multiplier: Optional[float] = None
    """Factor on the token embeddings as they enter the first layer; the tied output layer is not scaled. It is rounded
    to the model's precision first, as Hugging Face does for Gemma (sqrt of hidden_size). Position embeddings (`pos_emb`
    learned, sinusoidal) are added afterwards, without the factor. Null: 1."""

    add_qkv_bias: bool = False
    """Give the QKV projection a bias though `use_bias_in_attn_linear` is false, so that the output projection has none
    (Qwen2)."""

    use_bias_in_output_layer: bool = False
    """Give the output layer a bias, of one number for each token of the padded vocabulary (Phi 1 to 2). It starts at
    0. Only with `no_weight_tying`."""

    lora: Optional[dict] = None
    """Train low-rank adapters instead of the model (LoRA, Hu et al. 2021): {rank: 8, alpha: 16, dropout: 0.05, targets:
    [query_key_value, dense]}. Each target computes W x + alpha / rank x B A dropout(x); everything but A and B is
    frozen. Targets may also be linear1 and linear2, the projections of the MLP. The parts of a fused weight (q, k and
    v; up and gate) have an A each, as PEFT's adapters have. alpha is rank unless given, dropout 0. With `finetune` a
    checkpoint without adapters can be loaded. Null: the whole model is trained. See docs/lora.md."""
