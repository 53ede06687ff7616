"""Export to Hugging Face's classes: what they say of attention heads, and what they cannot say, which is refused.

`neox_config` is the checkpoint's YAML as tools/ckpts/convert_neox_to_hf.py reads it, with dashes or underscores.
"""

import json
import math
import os
from typing import Any, Dict, List

from megatron.errors import ConfigError, ConversionError
from megatron.geometry import HeadGeometry
from megatron.head_dim.hf_heads import hf_geometry

CLASS_NAMES = {
    "neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
STAMP_FILE = "head_geometry.json"
RMS_NORM_EPSILON = 1.0e-8
"""GPT-NeoX's, for a YAML that does not say it."""
QK_NORMS = {
    "attention.q_layernorm.scale": "self_attn.q_norm.weight",
    "attention.k_layernorm.scale": "self_attn.k_norm.weight",
}
QKV_BIAS, DENSE_BIAS = "attention.query_key_value.bias", "attention.dense.bias"
BUFFERS = ("_extra_state", "inv_freq")
"""Ends of the names of what a checkpoint holds beside weights."""


def attention_settings(neox_config: Dict[str, Any], architecture: str) -> Dict[str, Any]:
    """Keys of config.json beyond those of plain GPT-NeoX: head_dim, always as a number, for the classes that have it.

    Raises ConversionError with every reason for which the class cannot hold the model.
    """
    settings = _underscored(neox_config)
    problems, result = [], {}  # type: List[str], Dict[str, Any]
    geometry = None
    if architecture != "neox" or settings.get("head_dim") is not None or settings.get("softmax_scale") is not None:
        try:
            geometry = _geometry(settings)
        except ConfigError as error:
            problems += error.problems
    if geometry is not None:
        problems += _width_problems(geometry, architecture) + _scale_problems(settings, geometry, architecture)
    problems += _norm_problems(settings, architecture)
    if architecture != "neox":
        problems += _function_problems(settings, architecture)
    if problems:
        raise ConversionError(problems)
    if architecture != "neox":
        result["head_dim"] = geometry.head_dim
    if architecture == "qwen3":
        result["attention_bias"] = settings.get("use_bias_in_attn_linear", True)
    return result


def qwen3_config(**settings: Any):
    """The config object of a Qwen3 model. Raises ConversionError if transformers has none yet (before 4.51)."""
    try:
        from transformers import Qwen3Config
    except ImportError:
        raise ConversionError("--architecture=qwen3: this transformers has no Qwen3; update it (4.51 has)") from None
    return Qwen3Config(**settings)


def fit_to_checkpoint(hf_config, neox_config: Dict[str, Any], folder: str, state: Dict[str, Any]) -> None:
    """Set in a Llama, Mistral or Qwen3 config what the weights say better than the YAML does.

    state: the first rank's file with layer 2, the first with weights. The width of an MLP branch is that of linear2
    (intermediate_size of a gated MLP is three times it in GPT-NeoX's YAML), and attention has biases if they are there.
    With head_dim in the YAML, what it leaves out is GPT-NeoX's default: no window, and its epsilon.
    Raises ConversionError if the record beside the checkpoint is of other heads.
    """
    settings = _underscored(neox_config)
    _check_stamp(folder, hf_geometry(hf_config))
    weights = state.get("module") or state
    for name, tensor in weights.items():
        if name.endswith("mlp.linear2.weight"):
            hf_config.intermediate_size = tensor.shape[1] * (settings.get("model_parallel_size") or 1)
            break
    if hasattr(hf_config, "attention_bias"):
        hf_config.attention_bias = any(name.endswith(QKV_BIAS) for name in weights)
    if settings.get("head_dim") is not None:
        hf_config.rms_norm_eps = settings.get("rms_norm_epsilon", RMS_NORM_EPSILON)
        if hf_config.model_type == "mistral":
            reach = settings.get("sliding_window_width")  # how far back; transformers counts the token itself, too
            hf_config.sliding_window = None if reach is None else reach + 1


def with_attention_keys(keys: Dict[str, Any], hf_config) -> Dict[str, Any]:
    """The names of a layer's parameters (as in MODEL_KEYS), with the biases and norms of q and k that the model has.

    Each rank has the whole output bias and the whole norms, which makes them "norms" for the converter.
    """
    if "GQA_QKV_KEYS" not in keys:
        return keys
    more = {"GQA_QKV_KEYS": {}, "NORM_KEYS": {}}  # type: Dict[str, Dict[str, Any]]
    if getattr(hf_config, "attention_bias", False):
        more["GQA_QKV_KEYS"][QKV_BIAS] = [f"self_attn.{part}_proj.bias" for part in "qkv"]
        more["NORM_KEYS"][DENSE_BIAS] = "self_attn.o_proj.bias"
    if hf_config.model_type == "qwen3":
        more["NORM_KEYS"].update(QK_NORMS)
    return {**keys, **{kind: {**keys[kind], **names} for kind, names in more.items()}}


def refuse_unused(state: Dict[str, Any], keys: Dict[str, Any], layer_idx: int, sequential: bool) -> None:
    """Raises ConversionError if a layer has weights that `keys` does not name: they would be left out silently."""
    weights, prefix = (state["module"], f"sequential.{layer_idx}.") if sequential else (state, "")
    used = {name for names in keys.values() for name in names}
    names = (name[len(prefix) :] for name in weights if name.startswith(prefix))
    unused = sorted(name for name in names if name not in used and not name.endswith(BUFFERS))
    if unused:
        raise ConversionError(
            f"layer {layer_idx} has {', '.join(unused)}, for which the Hugging Face class has no place"
        )


def _underscored(neox_config: Dict[str, Any]) -> Dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in neox_config.items()}


def _geometry(settings: Dict[str, Any]) -> HeadGeometry:
    names = ("hidden_size", "num_attention_heads", "num_kv_heads", "head_dim")
    return HeadGeometry.from_config(*(settings.get(name) for name in names))


def _width_problems(geometry: HeadGeometry, architecture: str) -> List[str]:
    width, hidden, heads = geometry.head_dim, geometry.hidden_size, geometry.num_attention_heads
    if architecture == "neox" and not geometry.matches_hidden:
        return [
            f"head_dim={width}: {CLASS_NAMES['neox']} has heads of hidden_size / num_attention_heads only; use "
            "--architecture llama, mistral or qwen3, if the model is one otherwise"
        ]
    if architecture == "llama" and hidden % heads:
        return [
            f"hidden_size={hidden} does not divide by num_attention_heads={heads}, which {CLASS_NAMES['llama']} "
            "refuses whatever head_dim is; use --architecture mistral, or qwen3 with qk_norm_type=per_head"
        ]
    return []


def _scale_problems(settings: Dict[str, Any], geometry: HeadGeometry, architecture: str) -> List[str]:
    scale, default = settings.get("softmax_scale"), geometry.default_softmax_scale
    if scale is None or (type(scale) in (int, float) and math.isclose(scale, default, rel_tol=1e-9)):
        return []
    return [f"softmax_scale={scale}: {CLASS_NAMES[architecture]} scales by head_dim ** -0.5 = {default}, always"]


def _norm_problems(settings: Dict[str, Any], architecture: str) -> List[str]:
    kind = settings.get("qk_norm_type") or ("joint" if settings.get("use_qk_layernorm") else None)
    if architecture == "qwen3":
        if kind != "per_head":
            return [f"qk_norm_type={kind}: {CLASS_NAMES['qwen3']} has per_head"]
        if settings.get("norm", "layernorm") != "rmsnorm":
            return [f"norm={settings.get('norm', 'layernorm')}: {CLASS_NAMES['qwen3']} has rmsnorm"]
        return []
    if kind is None:
        return []
    hint = "; use --architecture qwen3" if kind == "per_head" else ""
    return [f"qk_norm_type={kind}: {CLASS_NAMES[architecture]} has no norms of queries and keys{hint}"]


def _function_problems(settings: Dict[str, Any], architecture: str) -> List[str]:
    """Of the Llama family in general."""
    name, problems = CLASS_NAMES[architecture], []
    if settings.get("rotary_pct", 1.0) != 1.0:
        problems.append(f"rotary_pct={settings['rotary_pct']}: {name} rotates whole heads")
    if settings.get("pos_emb", "rotary") != "rotary":
        problems.append(f"pos_emb={settings['pos_emb']}: {name} has rotary embeddings")
    if settings.get("gpt_j_residual"):
        problems.append(
            f"gpt_j_residual={settings['gpt_j_residual']}: {name} has attention and MLP one after the other"
        )
    if architecture == "qwen3" and settings.get("sliding_window_width") is not None:
        problems.append(f"sliding_window_width={settings['sliding_window_width']}: not exported for {name}")
    return problems


def _check_stamp(folder: str, geometry: HeadGeometry) -> None:
    """Without a record only shapes can tell, and 8 heads of 16 have those of 4 heads of 32."""
    path = os.path.join(folder, STAMP_FILE)
    if not os.path.isfile(path):
        return
    with open(path) as file:
        recorded = [HeadGeometry.from_stamp(layer["geometry"]) for layer in json.load(file)["layers"]]
    lines = {line for other in recorded for line in geometry.differences(other) if not line.startswith("rotary_ndims")}
    if lines:
        raise ConversionError([f"{line}, of the YAML and of {path}" for line in sorted(lines)])
