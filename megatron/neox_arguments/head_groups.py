"""Heads of several widths in one layer: {layer: 4, groups: [[64, 2], [256, 2]]} among the items of head_dim."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry
from megatron.mixed_geometry import AnyHeadGeometry, MixedHeadGeometry

FORM = "{layer: 4, groups: [[64, 2], [256, 2]]}"


class Group(NamedTuple):
    """Some heads of a layer. num_kv_heads None: by the ratio of the layer's query heads to its key/value heads."""

    head_dim: int
    num_attention_heads: int
    num_kv_heads: Optional[int] = None


def groups_by_layer(items: List[Dict[str, Any]], num_layers: int) -> Dict[int, Tuple[Group, ...]]:
    """The groups of each layer that an item names. Raises ConfigError with the problems of all items."""
    problems: List[str] = []
    found: Dict[int, Tuple[Group, ...]] = {}
    for item in items:
        faults = _item_problems(item, num_layers)
        problems += faults
        for layer in [] if faults else _layers(item):
            if layer in found:
                problems.append(f"head_dim: layer {layer} is given groups twice; keep one item for it")
            found[layer] = tuple(Group(*group) for group in item["groups"])
    if problems:
        raise ConfigError(problems)
    return found


def _layers(item: Dict[str, Any]) -> List[Any]:
    return item["layer"] if isinstance(item["layer"], list) else [item["layer"]]


def _item_problems(item: Dict[str, Any], num_layers: int) -> List[str]:
    if set(item) != {"layer", "groups"}:
        return [f"head_dim holds {item}; an item for a layer with heads of several widths is written {FORM}"]
    layers, groups, problems = _layers(item), item["groups"], []
    if not layers or not all(type(layer) is int and 0 <= layer < num_layers for layer in layers):
        problems.append(
            f"head_dim holds layer: {item['layer']!r}, which must be the number of a layer, from 0 to "
            f"{num_layers - 1}, or a list of such numbers"
        )
    if not isinstance(groups, list) or not groups or not all(map(_is_group, groups)):
        problems.append(
            f"head_dim holds groups: {groups!r}, which must be a list of [width, query heads] or [width, query heads, "
            f"key/value heads], all positive whole numbers: {FORM}"
        )
    return problems


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and len(group) in (2, 3) and all(type(n) is int and n > 0 for n in group)


def mixed_geometry(
    groups: Tuple[Group, ...],
    num_attention_heads: int,
    num_kv_heads: Optional[int],
    build: Callable[..., HeadGeometry],
) -> AnyHeadGeometry:
    """The geometry of a layer of these groups; num_attention_heads and num_kv_heads are the layer's. One group alone is
    a layer like any other. build: HeadGeometry.from_config with what all groups have in common.

    Raises ConfigError with every problem found.
    """
    problems: List[str] = []
    heads = sum(group.num_attention_heads for group in groups)
    if heads != num_attention_heads:
        problems.append(f"its groups have {heads} query heads in all, and num_attention_heads={num_attention_heads}")
    kv_heads = num_attention_heads if num_kv_heads is None else num_kv_heads
    built = []
    for group in groups:
        try:
            own = group.num_kv_heads or _kv_heads(group, num_attention_heads, kv_heads)
            built.append(
                build(num_attention_heads=group.num_attention_heads, num_kv_heads=own, head_dim=group.head_dim)
            )
        except ConfigError as error:
            name = f"group of {group.num_attention_heads} heads of {group.head_dim}"
            problems += [f"{name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return built[0] if len(built) == 1 else MixedHeadGeometry(tuple(built))


def _kv_heads(group: Group, num_attention_heads: int, num_kv_heads: int) -> int:
    own, rest = divmod(group.num_attention_heads * num_kv_heads, num_attention_heads)
    if rest:
        raise ConfigError(
            f"num_attention_heads={num_attention_heads} to num_kv_heads={num_kv_heads} makes no whole number of its "
            "key/value heads; give it one of its own: [width, query heads, key/value heads]"
        )
    return own
