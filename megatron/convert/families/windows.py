"""Sliding windows of config.json. Hugging Face's counts the query itself; ours does not."""

from typing import Any, Dict, List

from megatron.convert.families.llama import LlamaLike


def window_settings(config: Any) -> Dict[str, Any]:
    """sliding_window_width and layer_types of a config with a list layer_types. Without a sliding layer, no window."""
    if "sliding_attention" not in config.layer_types:
        return {"sliding_window_width": None, "layer_types": None}
    return {"sliding_window_width": config.sliding_window - 1, "layer_types": list(config.layer_types)}


def window_problems(config: Any) -> List[str]:
    """What is contradictory or not built in a config with a list layer_types."""
    types, window = config.layer_types, config.sliding_window
    odd = sorted(set(types) - {"sliding_attention", "full_attention"})
    if odd:
        return [f"layer_types holds {odd[0]}: only sliding_attention and full_attention are built"]
    if "sliding_attention" in types and not (window and getattr(config, "use_sliding_window", True)):
        return [
            f"layer_types has sliding_attention with sliding_window={window} and use_sliding_window="
            f"{getattr(config, 'use_sliding_window', None)}: correct one of them in config.json"
        ]
    return []


def window_config(neox_args) -> Dict[str, Any]:
    """Inverse of window_settings. Older readers know only use_sliding_window and the number of full layers before."""
    types = list(neox_args.layer_types)
    has_window = "sliding_attention" in types
    full = types.index("sliding_attention") if has_window else len(types)
    return {
        "layer_types": types,
        "use_sliding_window": has_window,
        "sliding_window": neox_args.sliding_window_width + 1 if has_window else None,
        "max_window_layers": full,
    }


class Windowed(LlamaLike):
    """Llama's layer with a window where layer_types says so."""

    expressed = LlamaLike.plain | {"sliding_window_width", "layer_types"}

    def settings(self, config: Any) -> Dict[str, Any]:
        return {**super().settings(config), **window_settings(config)}

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        return {**super().config(neox_args, vocabulary), **window_config(neox_args)}

    def import_problems(self, config: Any) -> List[str]:
        return window_problems(config)
