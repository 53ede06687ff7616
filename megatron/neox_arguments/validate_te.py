"""What is wrong with settings of the Transformer Engine path (te_*). Each check yields messages.

Only what no version of Transformer Engine can do, or what we do not ask of it, is refused here, without importing it.
What depends on the installed version is a BackendError when the model is built.
"""

from typing import Any, Iterator, Tuple

from megatron.neox_arguments import validate_model
from megatron.neox_arguments.layer_attention import layer_attention
from megatron.neox_arguments.per_layer import layers_text
from megatron.neox_arguments.widths import layers_by_geometry, mixed_layers, mlp_geometry

_OWN = "set te_mha: false (and te_fp8_mha: false)"


def _attention(settings: Any) -> Iterator[str]:
    name = "te_mha" if settings.te_mha else "te_fp8_mha"
    if not (settings.te_mha or settings.te_fp8_mha):
        return
    for setting, reason in _ATTENTION_REFUSALS:
        value = getattr(settings, setting)
        if value not in (None, False) and (setting != "pos_emb" or value in ("alibi", "rpe")):
            yield f"{setting}={value}: {name}=True {reason}; remove it, or {_OWN}"
    explicit = [kind for kind in settings.attention_config if kind != "auto"]
    if explicit:
        yield (
            f"attention_config={explicit[0]}: with {name}=True Transformer Engine picks its kernel itself; remove "
            f"attention_config, or {_OWN}"
        )
    yield from _attention_ranks(settings, name)
    yield from _attention_rotary(settings, name)


_ATTENTION_REFUSALS = (
    ("pos_emb", "adds no bias to the scores here, which alibi and rpe need"),
    ("use_qk_layernorm", "has no norm on queries and keys"),
    ("qk_norm_type", "has no norm on queries and keys"),
    ("v_norm", "has no norm on values"),
    ("shared_key_value", "has projections of keys and of values"),
    ("apply_query_key_layer_scaling", "does the softmax in fp32 and needs no smaller scores"),
    ("log_head_diagnostics", "does not show its queries and keys"),
    ("rotary_save_freqs_buffer", "keeps no buffer of rotary frequencies"),
    ("kv_cache_dtype", "keeps its own key/value cache, in the model's precision"),
)
"""(setting, why it does not go with Transformer Engine's attention), for any value but null and false."""


def _attention_ranks(settings: Any, name: str) -> Iterator[str]:
    ranks = settings.model_parallel_size
    if any(list(check(settings)) for check in validate_model.CHECKS):
        return
    mixed = mixed_layers(settings)
    if mixed:
        yield (
            f"head_dim={settings.head_dim} gives {layers_text(mixed)} heads of several widths, and {name}=True has one "
            f"for all heads of a layer; {_OWN}"
        )
    for kv_heads in dict.fromkeys(geometry.num_kv_heads for geometry in layers_by_geometry(settings)):
        if kv_heads % ranks:
            yield (
                f"num_kv_heads={kv_heads} does not divide by model_parallel_size={ranks}: {name}=True cannot share a "
                f"key/value head between ranks; lower model_parallel_size, or {_OWN}"
            )


def _attention_rotary(settings: Any, name: str) -> Iterator[str]:
    """Transformer Engine takes one table of angles for texts of all lengths."""
    if any(list(check(settings)) for check in validate_model.CHECKS):
        return  # without a sound model there are no tables
    for rotary in dict.fromkeys(layer_attention(settings, number).rotary for number in range(settings.num_layers)):
        scaling = None if rotary is None else rotary.scaling
        if scaling is None:
            continue
        threshold = scaling.length_threshold
        if threshold is not None and rotary.positions > threshold:
            yield (
                f"rope_scaling of type {scaling.rope_type} has other frequencies for texts of more than {threshold} "
                f"tokens, and {name}=True one table for all up to seq_length={rotary.positions}; {_OWN}"
            )
        if scaling.attention_factor != 1.0 and settings.rotary_pct != 1.0:
            yield (
                f"rope_scaling of type {scaling.rope_type} multiplies the rotated dimensions by "
                f"{scaling.attention_factor:g}, which {name}=True can only do with rotary_pct=1.0, not "
                f"{settings.rotary_pct}; {_OWN}"
            )


_TE_NORMS = ("te_layernorm", "te_rmsnorm")
_MLP_NORMS = ("layernorm", "rmsnorm", *_TE_NORMS)
_MLP_ACTIVATIONS = ("gelu", "geglu_tanh", "relu", "reglu", "swiglu")


def _mlp(settings: Any) -> Iterator[str]:
    if not settings.te_layernorm_mlp:
        return
    own = "or set te_layernorm_mlp: false"
    activation = settings.activation
    if activation == "gelu" and not settings.bias_gelu_fusion:
        yield (
            "activation=gelu: Transformer Engine's gelu is the tanh form; write bias_gelu_fusion: true, which means "
            f"that form, {own}"
        )
    elif activation == "geglu":
        yield f"activation=geglu: Transformer Engine's gelu is the tanh form; write activation: geglu_tanh, {own}"
    elif activation not in _MLP_ACTIVATIONS:
        yield (
            f"activation={settings.activation}: te_layernorm_mlp=True has no such activation; use one of "
            f"{', '.join(_MLP_ACTIVATIONS)}, {own}"
        )
    if settings.norm not in _MLP_NORMS:
        yield (
            f"norm={settings.norm}: te_layernorm_mlp=True has its norm inside and knows layernorm and rmsnorm only; "
            f"use one of {', '.join(_MLP_NORMS)}, {own}"
        )
    if settings.gpt_j_tied:
        yield (
            "gpt_j_tied=True: te_layernorm_mlp=True has a norm of its own before the MLP, so none is shared; remove "
            f"gpt_j_tied (GPT-NeoX computes with two norms here as well), {own}"
        )


def _norms(settings: Any) -> Iterator[str]:
    if settings.norm in _TE_NORMS and (settings.use_qk_layernorm or settings.qk_norm_type == "joint"):
        yield (
            f"norm={settings.norm} is over one dimension, and a joint norm on queries and keys over heads and "
            f"head_dim; use norm: {settings.norm[3:]} or qk_norm_type: per_head"
        )


_FP8_MULTIPLE = 16
"""Each dimension of an FP8 matrix product must be a multiple of it."""


def _fp8(settings: Any) -> Iterator[str]:
    if not settings.te_fp8_mha:
        described = [name for name in _FP8_RECIPE if getattr(settings, name) != _FP8_RECIPE[name]]
        if described:
            yield (
                f"{described[0]}={getattr(settings, described[0])} describes FP8, which is off; set te_fp8_mha: true, "
                f"or remove {', '.join(described)}"
            )
        return
    if settings.te_fp8_amax_compute_algo not in ("max", "most_recent"):
        yield f"te_fp8_amax_compute_algo={settings.te_fp8_amax_compute_algo}: use max or most_recent"
    if settings.te_fp8_amax_history_len < 1:
        yield f"te_fp8_amax_history_len={settings.te_fp8_amax_history_len}: at least one step is needed"
    if settings.precision == "fp32":
        yield "precision=fp32: te_fp8_mha=True casts between FP8 and a half precision; use bfloat16 or fp16"
    for what, size in _fp8_sizes(settings):
        if size % _FP8_MULTIPLE:
            yield f"{what} is {size}, and te_fp8_mha=True needs a multiple of {_FP8_MULTIPLE}; change it or remove that"


_FP8_RECIPE = {
    "te_fp8_format": "hybrid",
    "te_fp8_wgrad": True,
    "te_fp8_amax_history_len": 1,
    "te_fp8_amax_compute_algo": "most_recent",
    "te_fp8_margin": 0,
}
"""The settings that only describe FP8, and their defaults."""


def _fp8_sizes(settings: Any) -> Iterator[Tuple[str, int]]:
    """(name, number) of the dimensions of the matrices that are multiplied in FP8, on one rank."""
    if any(list(check(settings)) for check in validate_model.CHECKS):
        return
    ranks = settings.model_parallel_size
    yield "hidden_size", settings.hidden_size
    for partition in (geometry.shard(ranks) for geometry in layers_by_geometry(settings)):
        yield "the query width of a rank", partition.query_hidden_size
        yield "the QKV width of a rank", partition.qkv_hidden_size
    if settings.te_layernorm_mlp or settings.te_columnparallel or settings.te_rowparallel:
        yield "the MLP width of a rank", mlp_geometry(settings).shard(ranks).ffn_hidden_size
    rows = settings.train_micro_batch_size_per_gpu
    if rows:
        yield "seq_length x train_micro_batch_size_per_gpu", settings.seq_length * rows


CHECKS = (_attention, _mlp, _norms, _fp8)
