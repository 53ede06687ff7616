"""Settings that differ by the type of a layer, full_attention or sliding_attention."""

from typing import Any

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Hugging Face's names."""


def is_by_layer_type(value: Any) -> bool:
    """A mapping from layer types to a setting, in place of the setting itself."""
    return isinstance(value, dict) and bool(value) and set(value) <= set(LAYER_TYPES)


def of_layer_type(value: Any, layer_type: str) -> Any:
    """The setting of one layer type; a setting that is not by layer type holds for all. None if there is none."""
    return value.get(layer_type) if is_by_layer_type(value) else value
