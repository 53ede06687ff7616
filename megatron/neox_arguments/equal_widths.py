"""Numbers of models whose layers may differ in their attention widths: one, or one for each layer."""

from typing import Any, Callable, Dict, Hashable, List, Sequence

from megatron.geometry import HeadGeometry
from megatron.neox_arguments.per_layer import layers_text


def one_or_each(neox_args: Any, of: Callable[[HeadGeometry], Any]) -> Any:
    """A number of the geometries: itself where it is the same in all layers, else a list with one for each layer."""
    return one_or_list([of(neox_args.head_geometry(number)) for number in range(neox_args.num_layers)])


def one_or_list(values: List[Any]) -> Any:
    """The one value that all layers have, or the values of all layers."""
    return values[0] if all(value == values[0] for value in values) else values


def layers_by_value(values: Sequence[Hashable]) -> Dict[Any, List[int]]:
    """Each value with the numbers (0-based) of the layers that have it; `values` has one for each layer."""
    found: Dict[Any, List[int]] = {}
    for number, value in enumerate(values):
        found.setdefault(value, []).append(number)
    return found


def by_layer_text(value: Any) -> str:
    """What one_or_each gives as a text: "64", or "64 (layers 0-3), 128 (layers 4-11)"."""
    if not isinstance(value, list):
        return str(value)
    return ", ".join(f"{each} ({layers_text(numbers)})" for each, numbers in layers_by_value(value).items())
