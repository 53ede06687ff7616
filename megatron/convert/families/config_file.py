"""config.json, before anything is made of it: what no model here can be is refused by the name of the key."""

from typing import Any, Dict, List, Mapping

from megatron.convert.families import FAMILIES
from megatron.convert.families.base import families_by_layer
from megatron.errors import ConfigError, ConversionError
from megatron.geometry import HeadGeometry

_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_OTHER_WIDTHS = ("global_head_dim", "swa_head_dim", "num_query_heads", "num_global_key_value_heads", "per_layer_config")
_BY_LAYER = ("head_dim", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "intermediate_size")


def read_config(raw: Mapping[str, Any]) -> Any:
    """The config object of transformers for the contents of a config.json of transformers 4 or 5.

    A head_dim of null means the same as none: what the class says. A Llama whose hidden_size is no multiple of its
    heads is read as well, which transformers itself refuses. Raises ConversionError with every problem found.
    """
    problems = config_problems(raw)
    if problems:
        raise ConversionError("\n".join(problems))
    given = {key: value for key, value in raw.items() if key != "head_dim" or value is not None}
    try:
        return _config_object(given)
    except Exception as error:  # validation errors of many classes
        raise ConversionError(f"transformers refuses this config.json: {error}") from None


def _config_object(given: Dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[given["model_type"]]
    heads = given.get("num_attention_heads")
    if (
        given["model_type"] != "llama"
        or "head_dim" not in given
        or not heads
        or given.get("hidden_size", 0) % heads == 0
    ):
        return kind.from_dict(given)
    kv_heads = given.get("num_key_value_heads") or heads
    config = kind.from_dict({**given, "num_attention_heads": 1, "num_key_value_heads": kv_heads})
    config.num_attention_heads = heads  # the class only checks what it is made with
    return config


_CONVERTIBLE = ", ".join(name for name in FAMILIES if name != "mixtral")  # that one is only there to be refused by name


def config_problems(raw: Mapping[str, Any]) -> List[str]:
    """Why the model of a config.json cannot be imported, as far as keys say; empty if nothing is in the way."""
    present = {key: value for key, value in raw.items() if value not in (None, 0, False, [], {})}
    problems = [*_kind(raw), *_head_dim(raw), *_rotary_dim(raw)]
    for keys, what in (
        (_PARTS, "this model has parts beside a language model; save the language model by itself and import that"),
        (_LATENT, "multi-head latent attention is not built"),
        (_EXPERTS, "mixture of experts is not built; import a dense model"),
        (("quantization_config",), "the weights are quantised; import the model that they were made from"),
    ):
        problems += [f"{_shown(key, present[key])}: {what}" for key in keys if key in present]
    if isinstance(raw.get("v_head_dim"), int) and raw["v_head_dim"] != raw.get("head_dim"):
        problems.append(f"v_head_dim={raw['v_head_dim']}: values have the width of keys here, head_dim")
    return problems + _widths_by_layer(present)


def _widths_by_layer(present: Mapping[str, Any]) -> List[str]:
    """Heads of several widths, in a class that does not have them here; a family that does reads its keys itself."""
    family = FAMILIES.get(present.get("model_type"))
    if family is not None and family.by_layer:
        return []
    keys = [key for key in _OTHER_WIDTHS if key in present]
    keys += [key for key in _BY_LAYER if isinstance(present.get(key), (list, dict))]
    return [
        f"{key if isinstance(present[key], dict) else f'{key}={present[key]}'}: the layers of a "
        f"{present.get('model_type')} have the same widths here{families_by_layer()}"
        for key in keys
    ]


def _kind(raw: Mapping[str, Any]) -> List[str]:
    model_type = raw.get("model_type")
    if model_type is None:
        return [f"model_type is not in config.json; it says which model this is: one of {_CONVERTIBLE}"]
    if model_type not in FAMILIES:
        return [f"model_type={model_type} cannot be converted; can be: {_CONVERTIBLE}"]
    return []


def _head_dim(raw: Mapping[str, Any]) -> List[str]:
    width = raw.get("head_dim")
    if width is None or isinstance(width, (list, dict)) or (type(width) is int and width > 0):
        return []
    return [f"head_dim={width!r} must be a positive whole number, or absent for what the class says"]


def _rotary_dim(raw: Mapping[str, Any]) -> List[str]:
    """rotary_dim, which no class here reads, must not say otherwise than the share of a head that they read."""
    dim = raw.get("rotary_dim")
    if dim is None:
        return []
    share = raw.get("partial_rotary_factor") or (raw.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    numbers = raw.get("hidden_size"), raw.get("num_attention_heads")
    try:
        rotated = HeadGeometry.from_config(*numbers, head_dim=raw.get("head_dim"), rotary_pct=share).rotary_ndims
    except ConfigError as error:
        return error.problems
    if rotated == dim:
        return []
    return [f"rotary_dim={dim} and partial_rotary_factor={share}, which rotates {rotated}: remove the wrong one"]


def _shown(key: str, value: Any) -> str:
    return key if isinstance(value, (dict, list)) else f"{key}={value}"
