"""Tiny random models of Hugging Face's, our settings for the same function, and the map between the two's weights.

Written by hand for the tests, from the two models' definitions: one head, one name at a time. All widths are
co-prime or nearly so, and head_dim is not hidden_size / heads.
"""

from typing import Any, Callable, Dict, NamedTuple

import torch
import transformers
from torch import nn

VOCAB, SEQ, WINDOW = 118, 23, 7
"""Tokens, longest text, and Hugging Face's sliding_window, which counts the query itself."""
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 78, 6, 2, 10, 46
EPS, BASE, LOCAL_BASE = 3e-4, 5000.0, 300.0


class Family(NamedTuple):
    """hf: the model. settings: ours. norms: our names of a layer's norms for theirs. essential: the settings of ours
    without each of which another function is computed."""

    hf: nn.Module
    settings: Dict[str, Any]
    norms: Dict[str, str]
    essential: tuple


_PRE = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
_POST = {
    "post_attention_layernorm": "attention_output_layernorm",
    "post_feedforward_layernorm": "mlp_output_layernorm",
}
_SANDWICH = {
    "input_layernorm": "input_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    **_POST,
}
_GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}


def _build(name: str, config: Dict[str, Any], settings: Dict[str, Any], norms=_PRE, essential=(), layers=2) -> Family:
    """A model of the class `name`; `config` and `settings` are what differs from plain Llama, theirs and ours."""
    theirs = dict(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPS,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        tie_word_embeddings=False,
        pad_token_id=None,
        attn_implementation="eager",
    )
    theirs.update(config)
    text = "Text" if name == "Gemma3" else ""
    hf_config = getattr(transformers, f"{name}{text}Config")(**theirs)
    assert hf_config.head_dim == HEAD_DIM
    torch.manual_seed(0)
    hf = getattr(transformers, f"{name}ForCausalLM")(hf_config)
    ours = dict(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        ffn_hidden_size=FFN,
        num_layers=layers,
        padded_vocab_size=VOCAB,
        norm="rmsnorm",
        rms_norm_epsilon=EPS,
        activation="swiglu",
        rotary_emb_base=BASE,
        use_bias_in_attn_linear=False,
        use_bias_in_mlp=False,
        no_weight_tying=True,
    )
    ours.update(settings)
    return Family(_randomised(hf, ours.get("zero_centered_gamma", False)), ours, norms, essential)


def _randomised(hf: nn.Module, zero_centered: bool) -> nn.Module:
    """Weights under which activations stay of order one and no norm is the identity; fp32, no dropout."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(noise * 0.4 + (0.0 if zero_centered else 1.0))
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
    return hf.float().eval()


def qwen2() -> Family:
    """A bias on query, key and value only."""
    return _build("Qwen2", {}, dict(add_qkv_bias=True), essential=("add_qkv_bias", "rotary_emb_base"))


def qwen2_yarn() -> Family:
    """Qwen2 as published for long texts."""
    rope = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8}
    config = dict(rope_parameters={**rope, "rope_theta": BASE}, tie_word_embeddings=True)
    settings = dict(add_qkv_bias=True, rope_scaling=rope, no_weight_tying=False)
    return _build("Qwen2", config, settings, essential=("rope_scaling", "rotary_emb_base"))


def qwen3() -> Family:
    """Norms over each head of queries and keys."""
    return _build("Qwen3", {}, dict(qk_norm_type="per_head"), essential=("qk_norm_type",))


def llama31() -> Family:
    """llama3 scaling of the frequencies."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = dict(rope_parameters={**rope, "rope_theta": BASE})
    return _build("Llama", config, dict(rope_scaling=rope), essential=("rope_scaling",))


def mistral() -> Family:
    """A window in every layer."""
    settings = dict(sliding_window_width=WINDOW - 1)
    return _build("Mistral", dict(sliding_window=WINDOW), settings, essential=("sliding_window_width",))


def phi3() -> Family:
    """Fused projections, partial rotation and longrope beyond the length of pretraining."""
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.3], "long_factor": [1.7, 2.9]}
    config = dict(
        rope_parameters={**rope, "rope_theta": BASE, "partial_rotary_factor": 0.4, "factor": 4.0},
        original_max_position_embeddings=8,
    )
    scaling = {**rope, "original_max_position_embeddings": 8}
    settings = dict(rope_scaling=scaling, rotary_pct=0.4)
    return _build("Phi3", config, settings, essential=("rope_scaling",))


_GEMMA = dict(tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh")
_OUR_GEMMA = dict(
    no_weight_tying=False,
    zero_centered_gamma=True,
    activation="geglu_tanh",
    embedding_multiplier=HIDDEN**0.5,
)
_GEMMA_ESSENTIAL = ("zero_centered_gamma", "activation", "embedding_multiplier")


def gemma() -> Family:
    """1 + weight in the norms, scaled embeddings, the tanh form of gelu as gate."""
    config = dict(tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")
    return _build("Gemma", config, _OUR_GEMMA, essential=_GEMMA_ESSENTIAL)


def gemma2() -> Family:
    """Norms before and after each part, both soft caps, a scale of its own, a window in every other layer."""
    config = dict(
        _GEMMA,
        sliding_window=WINDOW,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
    )
    settings = dict(
        _OUR_GEMMA,
        norm_placement="sandwich",
        sliding_window_width=WINDOW - 1,
        layer_types=[[["sliding_attention", "full_attention"], "all"]],
        softmax_scale=5**-0.5,
        attn_logit_softcap=1.5,
        final_logit_softcap=4.0,
    )
    more = ("norm_placement", "layer_types", "softmax_scale", "attn_logit_softcap", "final_logit_softcap")
    return _build("Gemma2", config, settings, _SANDWICH, (*_GEMMA_ESSENTIAL, *more), layers=3)


def gemma3() -> Family:
    """Five layers with a window for each without, rotary bases of their own, norms over each head."""
    rope = {"rope_type": "linear", "factor": 8.0}
    config = dict(
        _GEMMA,
        sliding_window=WINDOW,
        query_pre_attn_scalar=13,
        rope_parameters={
            "full_attention": {**rope, "rope_theta": BASE},
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_BASE},
        },
    )
    settings = dict(
        _OUR_GEMMA,
        norm_placement="sandwich",
        sliding_window_width=WINDOW - 1,
        layer_types=[[["sliding_attention"] * 5 + ["full_attention"], "all"]],
        rotary_emb_base={"full_attention": BASE, "sliding_attention": LOCAL_BASE},
        rope_scaling={"full_attention": rope},
        softmax_scale=13**-0.5,
        qk_norm_type="per_head",
    )
    more = ("norm_placement", "layer_types", "softmax_scale", "rotary_emb_base", "rope_scaling", "qk_norm_type")
    return _build("Gemma3", config, settings, _SANDWICH, (*_GEMMA_ESSENTIAL, *more), layers=7)


def olmo2() -> Family:
    """Norms after each part only, and over all heads of queries and keys."""
    settings = dict(norm_placement="post", qk_norm_type="full_width")
    return _build("Olmo2", {}, settings, _POST, essential=("norm_placement", "qk_norm_type"))


FAMILIES: Dict[str, Callable[[], Family]] = {
    family.__name__: family
    for family in (qwen2, qwen2_yarn, qwen3, llama31, mistral, phi3, gemma, gemma2, gemma3, olmo2)
}
"""By name: functions that build a model and its description anew."""


def our_tensors(family: Family, theirs: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Weights (or gradients) of `family.hf` by their names -> the same by the names of GPT2ModelSequential."""
    layers = family.settings["num_layers"]
    result = {
        "sequential.0.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        f"sequential.{layers + 3}.norm.scale": theirs["model.norm.weight"],
    }
    if family.settings["no_weight_tying"]:
        result[f"sequential.{layers + 4}.final_linear.weight"] = theirs["lm_head.weight"]
    for number in range(layers):
        prefix = f"model.layers.{number}."
        layer = {name[len(prefix) :]: tensor for name, tensor in theirs.items() if name.startswith(prefix)}
        result.update({f"sequential.{number + 2}.{name}": x for name, x in _layer(layer, family.norms).items()})
    return result


def _layer(theirs: Dict[str, torch.Tensor], norms: Dict[str, str]) -> Dict[str, torch.Tensor]:
    ours = {f"{name}.scale": theirs[f"{their_name}.weight"] for their_name, name in norms.items()}
    if "mlp.gate_up_proj.weight" in theirs:
        gate, up = theirs["mlp.gate_up_proj.weight"].split(FFN)
    else:
        gate, up = theirs["mlp.gate_proj.weight"], theirs["mlp.up_proj.weight"]
    ours["mlp.linear1.weight"] = torch.cat([up, gate])
    ours["mlp.linear2.weight"] = theirs["mlp.down_proj.weight"]
    ours["attention.dense.weight"] = theirs["self_attn.o_proj.weight"]
    if "self_attn.qkv_proj.weight" in theirs:  # all queries, all keys, all values, as ours with grouped queries
        ours["attention.query_key_value.weight"] = theirs["self_attn.qkv_proj.weight"]
    for kind in ("weight", "bias"):
        parts = [theirs.get(f"self_attn.{name}_proj.{kind}") for name in "qkv"]
        if parts[0] is not None:
            ours[f"attention.query_key_value.{kind}"] = torch.cat(parts)
    for name in "qk":
        if f"self_attn.{name}_norm.weight" in theirs:
            ours[f"attention.{name}_layernorm.scale"] = theirs[f"self_attn.{name}_norm.weight"]
    return ours
