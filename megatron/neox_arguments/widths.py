"""From arguments to the geometry of a layer. The arithmetic itself is in megatron/geometry.py."""

from functools import partial
from typing import Any, Dict, List, Tuple

from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry, MLPGeometry
from megatron.mixed_geometry import AnyHeadGeometry
from megatron.neox_arguments.head_groups import groups_by_layer, mixed_geometry
from megatron.neox_arguments.head_schedule import schedule_problems, scheduled_width
from megatron.neox_arguments.layer_types import of_layer_type
from megatron.neox_arguments.per_layer import count_problem, expand, layers_text, number_of_layers

GATED_ACTIVATIONS = ("geglu", "geglu_tanh", "reglu", "swiglu", "bilinear", "glu")
"""Activations whose MLP has an up and a gate branch, stacked in linear1."""

PER_LAYER = ("head_dim", "num_kv_heads")
"""The widths that may differ from layer to layer."""


def head_geometry(args: Any, layer_number: int = 0) -> AnyHeadGeometry:
    """The attention widths of layer `layer_number` (0-based); `args` needs GPT-NeoX's argument names as attributes.

    Raises ConfigError if the numbers do not fit together.
    """
    widths = (_of_layer(args, name, layer_number) for name in PER_LAYER)
    return _geometry(args, *widths, _shares_key_value(args, layer_number))


def layers_by_geometry(args: Any) -> Dict[AnyHeadGeometry, List[int]]:
    """Each geometry of the model with the numbers of its layers, in the order of their first layers.

    Raises ConfigError with the problems of all layers, each with the layers that have it unless all have.
    """
    found: Dict[AnyHeadGeometry, List[int]] = {}
    problems: Dict[str, List[int]] = {}
    for widths, numbers in _layers_by_widths(args).items():
        try:
            found.setdefault(_geometry(args, *widths), []).extend(numbers)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).extend(numbers)
    if problems:
        raise ConfigError(named_layers(problems, args.num_layers))
    return {geometry: sorted(numbers) for geometry, numbers in found.items()}


def named_layers(problems: Dict[str, List[int]], num_layers: int) -> List[str]:
    """The problems, each with the layers that have it in front unless all layers have it."""
    return [
        problem if len(numbers) == (num_layers or 1) else f"{layers_text(sorted(numbers))}: {problem}"
        for problem, numbers in problems.items()
    ]


def only_head_geometry(args: Any) -> HeadGeometry:
    """The geometry that all heads of all layers have. Raises ConfigError saying which layers differ."""
    found = layers_by_geometry(args)
    if _is_uniform(found):
        return next(iter(found))
    settings = ", ".join(f"{name}={getattr(args, name)}" for name in PER_LAYER if is_per_layer(getattr(args, name)))
    raise ConfigError(
        f"{settings}: this needs one geometry for all layers, and here are {described(found)}; give all layers the "
        "same head_dim and num_kv_heads"
    )


def mixed_layers(args: Any) -> List[int]:
    """The numbers of the layers whose heads are of several widths."""
    found = layers_by_geometry(args).items()
    return sorted(number for geometry, numbers in found if len(geometry.groups) > 1 for number in numbers)


def has_uniform_heads(args: Any) -> bool:
    """All heads of all layers have one geometry."""
    return _is_uniform(layers_by_geometry(args))


def _is_uniform(found: Dict[AnyHeadGeometry, List[int]]) -> bool:
    return sum(len(geometry.groups) for geometry in found) == 1


def described(found: Dict[AnyHeadGeometry, List[int]]) -> str:
    """layers_by_geometry in words: "head_dim 64 with 4 kv heads in layers 0-3, head_dim 128 with ..."."""
    return ", ".join(
        f"{' and '.join(map(_heads_text, geometry.groups))} in {layers_text(numbers)}"
        for geometry, numbers in found.items()
    )


def _heads_text(group: HeadGeometry) -> str:
    shared = " whose keys are values too" if group.shared_key_value else ""
    return f"head_dim {group.head_dim} with {group.num_kv_heads} kv heads{shared}"


def is_per_layer(value: Any) -> bool:
    """A list of runs or a schedule, in place of one number for all layers."""
    return isinstance(value, (list, dict))


def _geometry(args: Any, head_dim: Any, num_kv_heads: Any, shared_key_value: bool) -> AnyHeadGeometry:
    """head_dim: a number, None, or the Groups of a layer that has several."""
    heads, build = (
        args.num_attention_heads,
        partial(
            HeadGeometry.from_config,
            hidden_size=args.hidden_size,
            rotary_pct=args.rotary_pct if args.pos_emb == "rotary" else None,
            shared_key_value=shared_key_value,
        ),
    )
    if isinstance(head_dim, tuple):
        return mixed_geometry(head_dim, heads, num_kv_heads, build)
    return build(num_attention_heads=heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _shares_key_value(args: Any, number: int) -> bool:
    """For all layers or by layer type. What is no layer type, or too short a list of them, is found by other checks."""
    value = args.shared_key_value
    if not isinstance(value, dict):
        return value
    return number < len(args.layer_types) and bool(of_layer_type(value, args.layer_types[number]))


def _of_layer(args: Any, name: str, number: int) -> Any:
    value = getattr(args, name)
    return _values(name, value, args.num_layers)[number] if is_per_layer(value) else value


def _layers_by_widths(args: Any) -> Dict[Tuple[Any, ...], List[int]]:
    """(head_dim, num_kv_heads, shared_key_value) of the layers. Raises ConfigError if a list or schedule is faulty."""
    columns, problems, layers = [], [], number_of_layers(args.num_layers or 1)
    for name in PER_LAYER:
        value = getattr(args, name)
        try:
            columns.append(_values(name, value, args.num_layers) if is_per_layer(value) else [value] * layers)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    columns.append([_shares_key_value(args, number) for number in range(layers)])
    found: Dict[Tuple[Any, ...], List[int]] = {}
    for number, widths in enumerate(zip(*columns, strict=True)):
        found.setdefault(widths, []).append(number)
    return found


def _values(name: str, value: Any, num_layers: int) -> List[Any]:
    """The setting's value in each layer: a number, or the Groups of a layer that has several. Raises ConfigError."""
    if isinstance(value, dict):
        problems = schedule_problems(name, value)
        if not problems:
            return [scheduled_width(value, number) for number in range(number_of_layers(num_layers))]
        raise ConfigError(problems)
    items = [item for item in value if isinstance(item, dict)] if name == "head_dim" else []
    values = expand([item for item in value if item not in items], num_layers, cut_off=True)
    odd = [item for item in values if type(item) is not int or item <= 0]
    if odd:
        raise ConfigError(
            f"{name} holds {odd[0]!r}, which is not a positive whole number; write pairs of a number (or a list of "
            'numbers) and how many layers have it, such as [[64, 4], [128, 8]] or [[[64, 128], "all"]], or one '
            "number for each layer"
        )
    problem = count_problem(name, values, num_layers)
    if problem:
        raise ConfigError(problem)
    groups = groups_by_layer(items, num_layers)
    return [groups.get(number, width) for number, width in enumerate(values)]


def mlp_geometry(args: Any, layer_number: int = 0) -> MLPGeometry:
    """The MLP widths of layer `layer_number` (0-based).

    Raises ConfigError if two ways of giving the width are used at once.
    """
    return MLPGeometry.from_config(
        hidden_size=args.hidden_size,
        gated=args.activation in GATED_ACTIVATIONS,
        ffn_hidden_size=args.ffn_hidden_size,
        intermediate_size=args.intermediate_size,
        expansion_factor=args.expansion_factor,
        mlp_multiple_of=args.mlp_multiple_of,
    )
