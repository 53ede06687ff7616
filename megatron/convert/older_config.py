"""Keys that transformers 4, and programs that read config.json as it does, look for; transformers 5 passes over them.

Without them a model would run there with its class's default frequencies, and no one would be told.
"""

from typing import Any, Dict, Mapping, Sequence

_SLIDING, _FULL = "sliding_attention", "full_attention"


def older_keys(config: Mapping[str, Any]) -> Dict[str, Any]:
    """What to add to a config in transformers 5's spelling: dtype, windows and rotary numbers by former names."""
    keys: Dict[str, Any] = {"torch_dtype": config["dtype"]} if "dtype" in config else {}
    if config["model_type"] == "gemma4_text":
        return keys  # never had other names
    if config["model_type"] == "gemma3_text":
        keys.update(_window_pattern(config["layer_types"]))
    rotary = config.get("rope_parameters")
    if not rotary:
        return keys
    if _FULL in rotary or _SLIDING in rotary:
        whole = rotary.get(_FULL) or rotary[_SLIDING]
        keys["rope_local_base_freq"] = (rotary.get(_SLIDING) or whole)["rope_theta"]
        return {**keys, **_flat(whole)}
    if config["model_type"] == "gpt_neox":
        named = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        return {**keys, **{named.get(key, key): value for key, value in _flat(rotary).items()}}
    return {**keys, **_flat(rotary)}


def _window_pattern(types: Sequence[str]) -> Dict[str, Any]:
    """What layer_types was before 4.53: every n-th layer is a full one. Empty if they are not so."""
    for n in range(1, len(types) + 2):
        if all((kind == _FULL) == (number % n == 0) for number, kind in enumerate(types, 1)):
            return {"sliding_window_pattern": n}
    return {}


def _flat(rotary: Mapping[str, Any]) -> Dict[str, Any]:
    apart = ("rope_theta", "partial_rotary_factor")
    keys: Dict[str, Any] = {key: rotary[key] for key in apart if key in rotary}
    if rotary.get("rope_type", "default") != "default":
        keys["rope_scaling"] = {key: value for key, value in rotary.items() if key not in apart}
    return keys
