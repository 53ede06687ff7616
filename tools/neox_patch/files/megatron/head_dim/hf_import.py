"""Import from Hugging Face's Llama, Mistral, Qwen2 and Qwen3 classes: what attention heads need, and the YAML keys."""

import os
from typing import Any, Dict, List

import torch
import yaml

from megatron.errors import ConversionError
from megatron.head_dim.hf_heads import hf_geometry, merge_qkv

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
SETTINGS_FILE = "neox_settings.yml"
LAYER_NAMES = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
    "self_attn.o_proj.bias",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
"""What GPT-NeoX has a place for."""


def weights_to_import(model, model_parallel_size: int, tied: bool) -> Dict[str, torch.Tensor]:
    """The weights of a model, without the output layer if it is the embedding and is to stay so.

    Raises ConversionError with every reason for which GPT-NeoX cannot hold the model.
    """
    weights, config = model.state_dict(), model.config
    problems = _shape_problems(config, model_parallel_size) + _weight_problems(weights)
    if tied and not config.tie_word_embeddings:
        problems.append("--tied: the model has an output layer of its own; leave it out")
    if config.hidden_act not in ACTIVATIONS:
        problems.append(f"hidden_act={config.hidden_act}: GPT-NeoX has no gated MLP with it")
    if problems:
        raise ConversionError(problems)
    for line in _warnings(config):
        print(f"WARNING: {line}")
    return {name: tensor for name, tensor in weights.items() if not (tied and name == "lm_head.weight")}


def attention_parameters(
    weights: Dict[str, torch.Tensor], hf_config, layer_num: int, model_parallel_size: int
) -> List[Dict[str, torch.Tensor]]:
    """For each rank, of one layer's attention: the fused q, k and v, and biases and norms if the model has them.

    By their names in GPT-NeoX's `attention`. All biases or none: where only the output projection has none (Qwen2),
    it gets zeros. Raises ConversionError if the shapes are not those of the config.
    """
    prefix = f"model.layers.{layer_num}.self_attn."
    geometry = hf_geometry(hf_config)
    ranks = [{} for _ in range(model_parallel_size)]  # type: List[Dict[str, torch.Tensor]]
    for kind in ("weight", "bias"):
        parts = [weights.get(f"{prefix}{part}_proj.{kind}") for part in "qkv"]
        if parts[0] is not None:
            for rank, fused in enumerate(merge_qkv(*parts, geometry, model_parallel_size)):
                ranks[rank][f"query_key_value.{kind}"] = fused
    whole = {f"{part}_layernorm.scale": weights.get(f"{prefix}{part}_norm.weight") for part in "qk"}
    if f"{prefix}q_proj.bias" in weights:
        zeros = torch.zeros_like(weights[f"{prefix}o_proj.weight"][:, 0])
        whole["dense.bias"] = weights.get(f"{prefix}o_proj.bias", zeros)
    for rank in ranks:
        rank.update({name: tensor.clone().detach() for name, tensor in whole.items() if tensor is not None})
    return ranks


def neox_settings(hf_config, weights: Dict[str, torch.Tensor], model_parallel_size: int) -> Dict[str, Any]:
    """The YAML keys of GPT-NeoX that the model needs. intermediate_size is three times the width of a branch there."""
    geometry = hf_geometry(hf_config)
    settings = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": geometry.hidden_size,
        "num_attention_heads": geometry.num_attention_heads,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "seq_length": hf_config.max_position_embeddings,
        "max_position_embeddings": hf_config.max_position_embeddings,
        "intermediate_size": 3 * hf_config.intermediate_size,
        "activation": ACTIVATIONS[hf_config.hidden_act],
        "norm": "rmsnorm",
        "rms_norm_epsilon": hf_config.rms_norm_eps,
        "pos_emb": "rotary",
        "rotary_pct": 1.0,
        "rotary_emb_base": _rope_base(hf_config),
        "use_bias_in_attn_linear": "model.layers.0.self_attn.q_proj.bias" in weights,
        "use_bias_in_mlp": False,
        "no_weight_tying": "lm_head.weight" in weights,
        "make_vocab_size_divisible_by": len(weights["model.embed_tokens.weight"]) // model_parallel_size,
        "model_parallel_size": model_parallel_size,
        "pipe_parallel_size": 0,
    }
    if "model.layers.0.self_attn.q_norm.weight" in weights:
        settings["qk_norm_type"] = "per_head"
    if _window(hf_config) is not None:
        settings["sliding_window_width"] = _window(hf_config)
    return settings


def write_neox_settings(folder: str, hf_config, weights: Dict[str, torch.Tensor], model_parallel_size: int) -> None:
    """Put the YAML keys beside the checkpoint, and show them."""
    path = os.path.join(folder, SETTINGS_FILE)
    text = yaml.safe_dump(neox_settings(hf_config, weights, model_parallel_size), sort_keys=False)
    with open(path, "w") as file:
        file.write(text)
    print(f"The settings of the model, also in {path}:\n{text}")


def _shape_problems(config, model_parallel_size: int) -> List[str]:
    problems = [*hf_geometry(config).shard_problems(model_parallel_size)]
    sizes = {"num_key_value_heads": hf_geometry(config).num_kv_heads, "vocab_size": config.vocab_size}
    sizes["intermediate_size"] = config.intermediate_size
    return problems + [
        f"{name}={size} does not divide by --tp={model_parallel_size}; use fewer ranks"
        for name, size in sizes.items()
        if size % model_parallel_size
    ]


def _weight_problems(weights: Dict[str, torch.Tensor]) -> List[str]:
    outside = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    unknown = {name for name in weights if name not in outside and _in_layer(name) not in LAYER_NAMES}
    kinds = sorted({_in_layer(name) for name in unknown if not name.endswith("inv_freq")})
    return [f"{kind}: GPT-NeoX has no place for this weight" for kind in kinds]


def _in_layer(name: str) -> str:
    return name.split(".", 3)[3] if name.startswith("model.layers.") else name


def _warnings(config) -> List[str]:
    lines = []
    if config.model_type not in MODEL_TYPES:
        lines.append(
            f"model_type={config.model_type} is none of {', '.join(MODEL_TYPES)}, as which it is read; compare logits"
        )
    rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        lines.append(f"rope_type={kind}: GPT-NeoX rotates without rope scaling, so results differ")
    return lines


def _rope_base(config) -> int:
    """rope_theta, which transformers 5 keeps in rope_parameters. GPT-NeoX takes whole numbers."""
    rope = getattr(config, "rope_parameters", None) or {}
    base = rope.get("rope_theta", getattr(config, "rope_theta", 10000))
    if base != int(base):
        raise ConversionError(f"rope_theta={base}: rotary_emb_base of GPT-NeoX is a whole number")
    return int(base)


def _window(config):
    """How far back a token sees, itself not counted, as it is in sliding_window. Qwen models have a switch for it."""
    window = getattr(config, "sliding_window", None)
    return window - 1 if window is not None and getattr(config, "use_sliding_window", True) else None
