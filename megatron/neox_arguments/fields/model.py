"""The shape of the model and how it computes."""

from dataclasses import dataclass
from typing import List, Literal, Optional, Union

_PLAIN = ("normal", "orthogonal", "xavier_uniform", "xavier_normal", "small_init", "wang_init")
_SCALED_BY_DEPTH = ("scaled_normal", "scaled_orthogonal", "single_residual_scaled_normal")
InitMethod = Literal[_PLAIN + _SCALED_BY_DEPTH]


@dataclass
class NeoXArgsModel:
    """The model: widths, attention, positions, norms, activations, initialisation."""

    precision: Optional[Literal["fp16", "fp32", "bfloat16"]] = None
    """Type of parameters and activations: fp32, fp16 (with loss scaling) or bfloat16. Null: what an enabled `fp16` or
    `bf16` block says, else fp32. Contradictions are errors."""

    num_layers: Optional[int] = None
    """Number of transformer layers. Required."""

    hidden_size: Optional[int] = None
    """Width of the residual stream, h. Required. It need not be num_attention_heads x head_dim when `head_dim` is set.
    """

    intermediate_size: Optional[int] = None
    """Width of the MLP before GPT-NeoX's gating rule: a gated activation (swiglu, geglu, ...) gets int(2/3 x
    intermediate_size) // 2 per branch, i.e. about a third, rounded up to `mlp_multiple_of`; others get all of it. Null:
    expansion_factor x hidden_size, or 4 x hidden_size. Use `ffn_hidden_size` to say the width itself."""

    ffn_hidden_size: Optional[int] = None
    """Exact width of one MLP branch: the input width of the MLP's output projection, what Hugging Face calls
    intermediate_size. No rounding and no 2/3 rule is applied. Null: GPT-NeoX's rule for `intermediate_size`; the two
    cannot be given together, nor this one with `expansion_factor`."""

    mlp_multiple_of: int = 1
    """The MLP branch width that follows from `intermediate_size`, `expansion_factor` or the default is rounded up to a
    multiple of this. `ffn_hidden_size` is never rounded: it must be a multiple already."""

    expansion_factor: Optional[float] = None
    """MLP width before the gating rule as a multiple of `hidden_size`. Excludes `intermediate_size` and
    `ffn_hidden_size`. Null: 4."""

    num_attention_heads: Optional[int] = None
    """Number of query heads. Required. Must be a multiple of `num_kv_heads` and of `model_parallel_size`."""

    num_kv_heads: Union[int, list, None] = None
    """Number of key/value heads, each shared by num_attention_heads / num_kv_heads query heads (grouped-query
    attention; 1 is multi-query); a list gives each layer its own, written as in `head_dim`. Null: as many as query
    heads. It also decides the order of the rows in a stored QKV weight: interleaved per head when equal to the query
    heads, [Q; K; V] when fewer. Must be a multiple of `model_parallel_size` or divide it: then several tensor-parallel
    ranks compute with the same key/value head."""

    head_dim: Union[int, list, dict, None] = None
    """Width of one attention head, d. Null: hidden_size / num_attention_heads, which must then be whole. Set, it is
    used as it is, and the query width num_attention_heads x head_dim may be smaller or larger than `hidden_size`; the
    output projection leads back to it. Recorded beside every checkpoint, because tensor shapes alone cannot tell 8
    heads of 16 from 4 of 32. Layers can differ: write pairs of a width, or a pattern of widths, and its repeats,
    [[64, 4], [128, 8]] or [[[64, 64, 128], "all"]] ("all": over all layers, cut off at the last one); or a plain list
    with one width for each layer; or {schedule: progressive, base: 64, exponent: 0.3, multiple_of: 8}, which is base x
    (layer + 1) ^ exponent, layers counted from 0, rounded to the nearest multiple of multiple_of (halfway upwards; at
    least one multiple). And heads of one layer can differ: {layer: 4, groups: [[64, 2], [256, 2]]} at the end of such a
    list, for one layer or a list of layers, instead of what the list gives them, with [width, query heads] or [width,
    query heads, key/value heads] for each group. See docs/widths.md."""

    softmax_scale: Optional[float] = None
    """Factor on the query-key products before the softmax, the same for every attention kernel. Null: head_dim ** -0.5.
    Must be a positive number."""

    seq_length: Optional[int] = None
    """Tokens in one training sample and the longest context in generation."""

    sliding_window_width: Optional[int] = None
    """How many previous tokens a token can attend to, besides itself, in every layer, or in the sliding_attention
    layers of `layer_types`. Hugging Face's sliding_window counts the token itself too: it is this plus 1. Null: all
    of them."""

    max_position_embeddings: Optional[int] = None
    """Rows of a learned position table, and the largest `seq_length` allowed. Required for every kind of position
    embedding."""

    norm: Literal["layernorm", "rmsnorm", "non_parametric_layernorm", "scalenorm", "te_rmsnorm", "te_layernorm"] = (
        "layernorm"
    )
    """Kind of normalisation in every layer and before the head: layernorm (weight and bias), rmsnorm (scale), scalenorm
    (one scale for the L2-normalised vector), non_parametric_layernorm (no parameters). te_layernorm and te_rmsnorm are
    Transformer Engine's kernels of the same functions; the weight's name in checkpoints is then `norm.weight` below the
    norm's own."""

    layernorm_fusion: bool = False
    """Asks for a fused layernorm kernel. Accepted for compatibility: torch's layernorm, which is always used, is one
    kernel already."""

    rmsnorm_fusion: bool = False
    """Use torch's one-pass rmsnorm kernel. Same function up to rounding."""

    use_qk_layernorm: bool = False
    """Normalise queries and keys before the rotary embedding with one norm shared by both, of the kind `norm`, with a
    weight of shape [heads, head_dim]. With layernorm the statistics run over the heads of a rank and their widths
    together, so the result depends on `model_parallel_size`, as in GPT-NeoX; with rmsnorm over each head."""

    layernorm_epsilon: float = 1e-05
    """Added to the variance in layernorm and non_parametric_layernorm."""

    rms_norm_epsilon: float = 1e-08
    """Added to the mean square in rmsnorm. Note that most published models use 1e-5 or 1e-6 instead of this default."""

    scalenorm_epsilon: float = 1e-08
    """Lower limit of the L2 norm that scalenorm divides by."""

    pos_emb: Literal["learned", "rotary", "sinusoidal", "rpe", "alibi", "none"] = "learned"
    """How positions enter: learned or sinusoidal tables added to the embedding; rotary turns queries and keys; rpe adds
    a learned T5-style bias to the scores; alibi adds a fixed slope per head; none. rpe and alibi need `global`
    attention, and rpe at most one pipeline stage."""

    rpe_num_buckets: int = 32
    """Number of distance buckets of the rpe bias. Only for pos_emb rpe."""

    rpe_max_distance: int = 128
    """Distance, in tokens, from which all positions share the last rpe bucket. Only for pos_emb rpe."""

    opt_pos_emb_offset: int = 0
    """Added to every position before the learned table is read; OPT models need 2. The table then has to hold that many
    more rows. Only for pos_emb learned."""

    no_weight_tying: bool = False
    """Give the output head its own weight. False: the head reuses the word embedding."""

    attention_config: Optional[list] = None
    """Kind of attention of each layer, as [[[kinds], repeats], ...], e.g. [[["global"], 12]], or "all" for repeats to
    fill all layers, or a plain list with one kind per layer. Built: global (explicit scores), flash (a fused kernel),
    chunked (blockwise in plain PyTorch, memory linear in the length) and auto (the fastest of them that can run the
    layer). All compute the same function. Null: auto everywhere; other kinds are refused."""

    sparsity_config: Optional[dict] = None
    """Block pattern of sparse attention. Refused unless null or empty: block-sparse attention is not built."""

    num_unique_layers: Optional[int] = None
    """Number of layers with parameters of their own, the rest sharing them. Refused unless null: not built (GPT-NeoX
    accepts and ignores it)."""

    param_sharing_style: str = "grouped"
    """Which layers share parameters. Refused unless default, like `num_unique_layers`."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times `model_parallel_size`, so that it splits evenly and matrix
    shapes suit the device. Part of a checkpoint's shape."""

    activation: Literal[
        "gelu", "geglu", "geglu_tanh", "relu", "softsign", "swish", "mish", "silu", "reglu", "swiglu", "bilinear", "glu"
    ] = "gelu"
    """Activation of the MLP. gelu, relu, softsign, silu, swish (the same as silu) and mish are plain; geglu,
    geglu_tanh, reglu, swiglu, bilinear and glu are gated: one branch times the activation of the other. gelu and geglu
    are exact; `bias_gelu_fusion` gives gelu the tanh approximation, and geglu_tanh is geglu with it (Hugging Face's
    gelu_pytorch_tanh in Gemma's MLP)."""

    use_flashattn_swiglu: bool = False
    """Asks for flash-attn's swiglu kernel. Accepted for compatibility; same function, no separate kernel here."""

    scaled_upper_triang_masked_softmax_fusion: bool = False
    """Asks for a fused causal softmax. Accepted for compatibility; same function, no separate kernel here. For speed
    use `flash` in `attention_config`."""

    scaled_masked_softmax_fusion: bool = False
    """Asks for a fused masked softmax. Accepted for compatibility; same function, no separate kernel here."""

    bias_gelu_fusion: bool = False
    """With activation gelu: use the tanh approximation, which is what GPT-NeoX's fused kernel computes. This changes
    results slightly, so a model keeps the setting it was trained with. No effect on other activations."""

    bias_dropout_fusion: bool = False
    """Asks for bias, dropout and residual in one kernel. Accepted for compatibility; same function, no separate kernel
    here."""

    rope_fusion: bool = False
    """Asks for a fused rotary kernel. Accepted for compatibility; same function, no separate kernel here."""

    fused_kernels_build_path: Union[str, None] = None
    """Where GPT-NeoX puts its compiled kernels. Accepted for compatibility; there are none to compile here."""

    fp16_lm_cross_entropy: bool = False
    """Compute the loss in fp16 instead of fp32 to save memory. Only with fp16 precision."""

    init_method_std: float = 0.02
    """Standard deviation of the normal and scaled normal initialisations."""

    apply_query_key_layer_scaling: bool = False
    """In `global` attention, divide the scores by the layer's number and multiply them back inside an fp32 softmax,
    which keeps fp16 scores in range. The same function up to rounding, except that the bias of alibi and rpe is
    multiplied too, as in GPT-NeoX. Flash kernels need no such care."""

    use_cpu_initialization: bool = False
    """Draw initial weights on the CPU. Always so without a GPU. Weights do not depend on how the model is split, but
    CPU and GPU generators draw different numbers."""

    attention_softmax_in_fp32: bool = False
    """Take the softmax of `global` attention in fp32 for half-precision models. Flash kernels do so in any case."""

    rotary_pct: float = 1.0
    """Share of head_dim that is rotated, from the front; int(head_dim x rotary_pct) must be even and positive. Only for
    pos_emb rotary."""

    rotary_emb_base: Union[int, float, dict] = 10000
    """Base of the rotary frequencies, theta. A mapping from full_attention and sliding_attention to a base gives each
    layer type (see `layer_types`) its own. Only for pos_emb rotary."""

    rotary_save_freqs_buffer: bool = False
    """Store the rotary frequencies in checkpoints as `attention.rotary_emb.inv_freq`, which older GPT-NeoX checkpoints
    have."""

    init_method: InitMethod = "normal"
    """Initialisation of the embedding, QKV and first MLP weights. normal: std init_method_std; scaled_normal: that /
    sqrt(2 x layers); single_residual_scaled_normal: that / sqrt(layers); small_init: std sqrt(2 / (5 x hidden_size));
    wang_init: std 2 / (layers x sqrt(hidden_size)); orthogonal: gain sqrt(2), scaled_orthogonal: sqrt(2 / layers);
    xavier_uniform and xavier_normal as published."""

    output_layer_init_method: InitMethod = "scaled_normal"
    """Initialisation of the projections that write into the residual stream: attention output and second MLP weight.
    Same choices as `init_method`."""

    gmlp_attn_dim: int = 64
    """Width of the attention inside amlp layers. Refused unless default: gmlp and amlp are not built."""

    gpt_j_residual: bool = False
    """Compute attention and MLP side by side from the same layer input and add both, x + attn(ln1(x)) + mlp(ln2(x)),
    with one sum over tensor-parallel ranks. False: one after the other."""

    gpt_j_tied: bool = False
    """One norm, input_layernorm, feeds both branches of a parallel residual; needs `gpt_j_residual`. The second norm
    stays in the checkpoint, unused."""

    use_bias_in_norms: bool = True
    """Without effect for norms that have no bias (rmsnorm, scalenorm, non_parametric_layernorm). False together with
    layernorm is refused: layernorm keeps its bias, as in GPT-NeoX."""

    use_bias_in_attn_linear: bool = True
    """Bias in the QKV and attention output projections."""

    use_bias_in_mlp: bool = True
    """Bias in both MLP projections."""

    soft_prompt_tuning: Optional[dict] = None
    """Train only a prompt of embeddings. Refused unless null or disabled: not built."""

    mamba_selective_scan_fusion: bool = False
    """A fused scan kernel for mamba layers. Refused unless default: mamba is not built."""

    mamba_causal_conv_fusion: bool = False
    """A fused convolution kernel for mamba layers. Refused unless default: mamba is not built."""

    mamba_inner_func_fusion: bool = False
    """One kernel for the inside of a mamba layer. Refused unless default: mamba is not built."""

    mamba_selective_fp32_params: bool = True
    """Keep some mamba parameters in fp32. Refused unless default: mamba is not built."""

    mamba_use_bias_in_conv: bool = True
    """Bias in mamba's convolution. Refused unless default: mamba is not built."""

    mamba_use_bias_in_linears: bool = False
    """Bias in mamba's projections. Refused unless default: mamba is not built."""

    output_layer_parallelism: Literal["column"] = "column"
    """How the head is split over tensor-parallel ranks. Column (by vocabulary) is the only way."""

    serve_model_weights: bool = False
    """Serve the weights of the running model to other programs. Refused unless false: not built."""

    weight_server_port: Union[int, List[int]] = 6000
    """Port of the weight server, or one per rank. Refused unless default: not built."""

    online_dataserver_ips: Union[str, List[str]] = "localhost"
    """Addresses that online training asks for data. Refused unless default: not built."""

    online_dataserver_ports: Union[int, List[int]] = 10000
    """Ports that online training asks for data. Refused unless default: not built."""

    te_columnparallel: bool = False
    """Use Transformer Engine's linear layer for the projections whose rows are split over the model-parallel ranks:
    QKV, the first of the MLP, the output layer. Same weights, names and function."""

    te_rowparallel: bool = False
    """Use Transformer Engine's linear layer for the projections whose columns are split over the model-parallel ranks:
    the attention's output, the second of the MLP. Same weights, names and function."""

    te_layernorm_mlp: bool = False
    """Use Transformer Engine's module of norm and MLP in one. Widths, biases, epsilon and initial weights are those of
    the layers that it replaces; in checkpoints they are `mlp.layer_norm_weight`, `mlp.fc1_weight`, `mlp.fc2_weight`
    (and biases), the rows of a gated fc1 being [gate; up] where linear1 has [up; gate]. Takes norm layernorm, rmsnorm
    and their te_ forms, and activation relu, reglu, swiglu, geglu_tanh, and gelu with `bias_gelu_fusion`: Transformer
    Engine's gelu is the tanh form. Refused with gpt_j_tied."""

    te_mha: bool = False
    """Let Transformer Engine (1.12 or 2.x, to be installed) do all of attention, projections included. It computes the
    same function in every width, window, scale and bias, and starts from the same weights; in checkpoints they are
    `attention.qkv` and `attention.proj`, the QKV rows grouped by key/value head. It picks its own kernel, so leave
    `attention_config` out. Refused with it: pos_emb alibi and rpe, norms on queries and keys, fewer key/value heads
    than `model_parallel_size`, `kv_cache_dtype`, and `attn_logit_softcap` where the installed version has none."""

    te_fp8_format: Literal["e4m3", "hybrid"] = "hybrid"
    """Number format of FP8: e4m3 everywhere, or hybrid, which takes e5m2 for gradients. Like the other te_fp8_
    settings refused unless `te_fp8_mha` switches FP8 on."""

    te_fp8_wgrad: bool = True
    """Compute weight gradients in FP8 too; false leaves these products in the model's precision."""

    te_fp8_amax_history_len: int = 1
    """Steps over which FP8 scaling remembers the largest values."""

    te_fp8_amax_compute_algo: str = "most_recent"
    """How FP8 scaling uses that history: most_recent or max."""

    te_fp8_margin: int = 0
    """FP8 scaling factors are divided by 2 to this power."""

    te_fp8_mha: bool = False
    """Compute the transformer layers in FP8, and attention between its projections as well: all products that
    Transformer Engine makes in them, those of `te_mha`, which this includes, and of `te_layernorm_mlp`,
    `te_columnparallel` and `te_rowparallel` where set. The scaling is delayed, with the largest values agreed on
    between the model-parallel ranks. Needs fp16 or bfloat16, widths and tokens of a micro batch in multiples of 16,
    and a GPU of compute capability 8.9 or more: an error says so on others. Text is generated without FP8, from the
    same weights."""

    dim_att: Optional[int] = None
    """Attention width of rwkv layers. Refused unless null: rwkv is not built."""

    head_size: Optional[int] = None
    """Head width of rwkv layers, not of attention: that is `head_dim`. Refused unless null: rwkv is not built."""

    ffn_dim: Optional[int] = None
    """Channel-mixing width of rwkv layers. Refused unless null: rwkv is not built; for the MLP set `ffn_hidden_size`.
    """
