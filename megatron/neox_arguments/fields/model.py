"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import List, Literal, Optional, Union


@dataclass
class NeoXArgsModel:
    """TODO: what these arguments are for."""

    precision: Optional[Literal["fp16", "fp32", "bfloat16"]] = None
    """TODO."""

    num_layers: Optional[int] = None
    """TODO."""

    hidden_size: Optional[int] = None
    """TODO."""

    intermediate_size: Optional[int] = None
    """TODO."""

    ffn_hidden_size: Optional[int] = None
    """TODO."""

    mlp_multiple_of: int = 1
    """TODO."""

    expansion_factor: Optional[float] = None
    """TODO."""

    num_attention_heads: Optional[int] = None
    """TODO."""

    num_kv_heads: Optional[int] = None
    """TODO."""

    head_dim: Optional[int] = None
    """TODO."""

    softmax_scale: Optional[float] = None
    """TODO."""

    seq_length: Optional[int] = None
    """TODO."""

    sliding_window_width: Optional[int] = None
    """TODO."""

    max_position_embeddings: Optional[int] = None
    """TODO."""

    norm: Literal["layernorm", "rmsnorm", "non_parametric_layernorm", "scalenorm", "te_rmsnorm", "te_layernorm"] = (
        "layernorm"
    )
    """TODO."""

    layernorm_fusion: bool = False
    """TODO."""

    rmsnorm_fusion: bool = False
    """TODO."""

    use_qk_layernorm: bool = False
    """TODO."""

    layernorm_epsilon: float = 1e-05
    """TODO."""

    rms_norm_epsilon: float = 1e-08
    """TODO."""

    scalenorm_epsilon: float = 1e-08
    """TODO."""

    pos_emb: Literal["learned", "rotary", "sinusoidal", "rpe", "alibi", "none"] = "learned"
    """TODO."""

    rpe_num_buckets: int = 32
    """TODO."""

    rpe_max_distance: int = 128
    """TODO."""

    opt_pos_emb_offset: int = 0
    """TODO."""

    no_weight_tying: bool = False
    """TODO."""

    attention_config: Optional[list] = None
    """TODO."""

    sparsity_config: Optional[dict] = None
    """TODO."""

    num_unique_layers: Optional[int] = None
    """TODO."""

    param_sharing_style: str = "grouped"
    """TODO."""

    make_vocab_size_divisible_by: int = 128
    """TODO."""

    activation: Literal[
        "gelu", "geglu", "relu", "softsign", "swish", "mish", "silu", "reglu", "swiglu", "bilinear", "glu"
    ] = "gelu"
    """TODO."""

    use_flashattn_swiglu: bool = False
    """TODO."""

    scaled_upper_triang_masked_softmax_fusion: bool = False
    """TODO."""

    scaled_masked_softmax_fusion: bool = False
    """TODO."""

    bias_gelu_fusion: bool = False
    """TODO."""

    bias_dropout_fusion: bool = False
    """TODO."""

    rope_fusion: bool = False
    """TODO."""

    fused_kernels_build_path: Union[str, None] = None
    """TODO."""

    fp16_lm_cross_entropy: bool = False
    """TODO."""

    init_method_std: float = 0.02
    """TODO."""

    apply_query_key_layer_scaling: bool = False
    """TODO."""

    use_cpu_initialization: bool = False
    """TODO."""

    attention_softmax_in_fp32: bool = False
    """TODO."""

    rotary_pct: float = 1.0
    """TODO."""

    rotary_emb_base: int = 10000
    """TODO."""

    rotary_save_freqs_buffer: bool = False
    """TODO."""

    init_method: Literal[
        "normal",
        "scaled_normal",
        "orthogonal",
        "scaled_orthogonal",
        "xavier_uniform",
        "xavier_normal",
        "wang_init",
        "small_init",
        "single_residual_scaled_normal",
    ] = "normal"
    """TODO."""

    output_layer_init_method: Literal[
        "normal",
        "scaled_normal",
        "orthogonal",
        "scaled_orthogonal",
        "xavier_uniform",
        "xavier_normal",
        "wang_init",
        "small_init",
        "single_residual_scaled_normal",
    ] = "scaled_normal"
    """TODO."""

    gmlp_attn_dim: int = 64
    """TODO."""

    gpt_j_residual: bool = False
    """TODO."""

    gpt_j_tied: bool = False
    """TODO."""

    use_bias_in_norms: bool = True
    """TODO."""

    use_bias_in_attn_linear: bool = True
    """TODO."""

    use_bias_in_mlp: bool = True
    """TODO."""

    soft_prompt_tuning: Optional[dict] = None
    """TODO."""

    mamba_selective_scan_fusion: bool = False
    """TODO."""

    mamba_causal_conv_fusion: bool = False
    """TODO."""

    mamba_inner_func_fusion: bool = False
    """TODO."""

    mamba_selective_fp32_params: bool = True
    """TODO."""

    mamba_use_bias_in_conv: bool = True
    """TODO."""

    mamba_use_bias_in_linears: bool = False
    """TODO."""

    output_layer_parallelism: Literal["column"] = "column"
    """TODO."""

    serve_model_weights: bool = False
    """TODO."""

    weight_server_port: Union[int, List[int]] = 6000
    """TODO."""

    online_dataserver_ips: Union[str, List[str]] = "localhost"
    """TODO."""

    online_dataserver_ports: Union[int, List[int]] = 10000
    """TODO."""

    te_columnparallel: bool = False
    """TODO."""

    te_rowparallel: bool = False
    """TODO."""

    te_layernorm_mlp: bool = False
    """TODO."""

    te_mha: bool = False
    """TODO."""

    te_fp8_format: Literal["e4m3", "hybrid"] = "hybrid"
    """TODO."""

    te_fp8_wgrad: bool = True
    """TODO."""

    te_fp8_amax_history_len: int = 1
    """TODO."""

    te_fp8_amax_compute_algo: str = "most_recent"
    """TODO."""

    te_fp8_margin: int = 0
    """TODO."""

    te_fp8_mha: bool = False
    """TODO."""

    dim_att: Optional[int] = None
    """TODO."""

    head_size: Optional[int] = None
    """TODO."""

    ffn_dim: Optional[int] = None
    """TODO."""
