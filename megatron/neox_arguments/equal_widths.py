"""Numbers of models whose layers may differ in their attention widths: one, or one for each layer.

In a layer whose heads are in groups of several widths, such a number is a tuple with one for each group.
"""

from typing import Any, Callable, Dict, Hashable, List, Sequence

from megatron.geometry import HeadGeometry
from megatron.mixed_geometry import AnyHeadGeometry
from megatron.neox_arguments.per_layer import layers_text


def one_or_each(neox_args: Any, of: Callable[[AnyHeadGeometry], Any]) -> Any:
    """A number of the geometries: itself where it is the same in all layers, else a list with one for each layer."""
    return one_or_list([of(neox_args.head_geometry(number)) for number in range(neox_args.num_layers)])


def one_or_list(values: List[Any]) -> Any:
    """The one value that all layers have, or the values of all layers; these too where the value is one of groups."""
    alike = all(value == values[0] for value in values)
    return values[0] if alike and not isinstance(values[0], tuple) else values


def of_groups(geometry: AnyHeadGeometry, of: Callable[[HeadGeometry], Any]) -> Any:
    """A number of a layer whose heads are all alike, or a tuple of those of its groups."""
    values = tuple(of(group) for group in geometry.groups)
    return values if len(values) > 1 else values[0]


def head_dims(geometry: AnyHeadGeometry) -> Any:
    """The head_dim of a layer, or of its groups."""
    return of_groups(geometry, lambda group: group.head_dim)


def softmax_scales(neox_args: Any, layer_number: int) -> Any:
    """The softmax scale of a layer, or of its groups."""
    groups = range(len(neox_args.head_geometry(layer_number).groups))
    scales = tuple(neox_args.layer_attention(layer_number, group).softmax_scale for group in groups)
    return scales if len(scales) > 1 else scales[0]


def layers_by_value(values: Sequence[Hashable]) -> Dict[Any, List[int]]:
    """Each value with the numbers (0-based) of the layers that have it; `values` has one for each layer."""
    found: Dict[Any, List[int]] = {}
    for number, value in enumerate(values):
        found.setdefault(value, []).append(number)
    return found


def by_layer_text(value: Any) -> str:
    """What one_or_each gives as a text: "64", or "64 (layers 0-3), 64 + 256 (layer 4)"."""
    if not isinstance(value, list):
        return layer_text(value)
    return ", ".join(f"{layer_text(each)} ({layers_text(numbers)})" for each, numbers in layers_by_value(value).items())


def layer_text(value: Any, shown: Callable[[Any], str] = str) -> str:
    """A number of one layer, or those of its groups as "64 + 256"."""
    return " + ".join(map(shown, value)) if isinstance(value, tuple) else shown(value)
