"""Rotary positions of config.json: transformers 5's rope_parameters, to which transformers 4's keys are read too."""

from typing import Any, Callable, Dict, List, Optional, Tuple

from megatron.neox_arguments.layer_attention import is_by_layer_type, of_layer_type

_ORIGINAL = "original_max_position_embeddings"
PROPORTIONAL = "proportional"
"""The rope_type with which partial_rotary_factor means something else."""


def rope_settings(config: Any) -> Dict[str, Any]:
    """rotary_emb_base, rope_scaling and rotary_pct of a config with one set of rotary numbers for all layers.

    Type dynamic: its max_position_embeddings is the length that the scaling starts from, and ours the length after
    scaling, so seq_length and max_position_embeddings are among the settings then.
    """
    parameters = {key: value for key, value in config.rope_parameters.items() if key != "type"}
    rope_type = parameters.get("rope_type", "default")
    base = parameters.pop("rope_theta")
    # Of type proportional the share is a number of the scaling: the whole head has frequencies, some of them 0.
    share = 1.0 if rope_type == PROPORTIONAL else parameters.pop("partial_rotary_factor", 1.0)
    settings = {"rotary_emb_base": base, "rotary_pct": share, "rope_scaling": None}
    if rope_type == "default":
        return settings
    if rope_type == "dynamic":
        original = config.max_position_embeddings
        parameters[_ORIGINAL] = original
        longest = int(original * parameters.get("factor", 1))
        settings.update(seq_length=longest, max_position_embeddings=longest)
    return {**settings, "rope_scaling": parameters}


def whole_rotation_problems(config: Any, architecture: str) -> List[str]:
    """For classes that rotate whole heads, whatever their config.json says."""
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if share == 1.0 or config.rope_parameters.get("rope_type") == PROPORTIONAL:
        return []
    return [
        f"partial_rotary_factor={share}: a {architecture} of transformers rotates the whole head and ignores it; "
        "remove it from config.json if the model was trained so"
    ]


def proportional_problems(neox_args, architecture: str) -> List[str]:
    """For classes whose partial_rotary_factor is the share of a head that is cut off and rotated by itself."""
    layers = (neox_args.layer_attention(number).rotary for number in range(neox_args.num_layers))
    if not any(rotary and rotary.scaling and rotary.scaling.rope_type == PROPORTIONAL for rotary in layers):
        return []
    return [
        f"rope_scaling={neox_args.rope_scaling}: in a {architecture} partial_rotary_factor says how wide the rotated "
        f"part of a head is, so it cannot have type {PROPORTIONAL}"
    ]


def rope_config(neox_args) -> Dict[str, Any]:
    """Inverse of rope_settings, for models of which rotary_problems has nothing to say."""
    base, scaling = _of_all_layers(neox_args)
    parameters = _plain(scaling)
    config: Dict[str, Any] = {}
    if parameters["rope_type"] == "dynamic":
        config["max_position_embeddings"] = parameters.pop(_ORIGINAL, neox_args.max_position_embeddings)
    if neox_args.rotary_pct != 1.0:
        parameters["partial_rotary_factor"] = neox_args.rotary_pct
    return {**config, "rope_parameters": {**parameters, "rope_theta": float(base)}}


def with_plain_base(neox_args):
    """The same model without rotary_denominator_scale, which config.json has no word for: the base to the power 1 /
    scale gives equal frequencies, to the last bit, in every type of scaling."""
    scale = neox_args.rotary_denominator_scale
    if scale is None or neox_args.pos_emb != "rotary":
        return neox_args
    return neox_args.update(
        rotary_emb_base=_each(neox_args.rotary_emb_base, lambda base: float(base) ** (1 / scale)),
        rope_scaling=_each(neox_args.rope_scaling, _without_base),
        rotary_denominator_scale=None,
    )


def _each(setting: Any, change: Callable[[Any], Any]) -> Any:
    if is_by_layer_type(setting):
        return {layer_type: change(one) for layer_type, one in setting.items()}
    return change(setting)


def _without_base(scaling: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """rope_theta can only repeat rotary_emb_base."""
    return scaling and {key: value for key, value in scaling.items() if key != "rope_theta"}


def rotary_problems(neox_args, architecture: str) -> List[str]:
    """Why one set of rotary numbers does not describe the model; empty if it does, or if nothing is rotated."""
    layers = (neox_args.layer_attention(number) for number in range(neox_args.num_layers))
    by_type = {layer.layer_type: layer.rotary for layer in layers if layer.rotary is not None}
    if len(set(by_type.values())) <= 1:
        return []
    return [
        f"rotary_emb_base={neox_args.rotary_emb_base}, rope_scaling={neox_args.rope_scaling}: they differ by layer "
        f"type, and a {architecture} has one of each for all layers"
    ]


def _of_all_layers(neox_args) -> Tuple[float, Optional[Dict[str, Any]]]:
    """(base, scaling) of the first layer that is rotated, if any is."""
    layers = [neox_args.layer_attention(number) for number in range(neox_args.num_layers)]
    layer = next((layer for layer in layers if layer.rotary is not None), layers[0])
    return (
        of_layer_type(neox_args.rotary_emb_base, layer.layer_type),
        of_layer_type(neox_args.rope_scaling, layer.layer_type),
    )


def _plain(scaling: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """A scaling in transformers 5's spelling, with nothing in it that other keys say."""
    said = ["type", "rope_theta"]
    if (scaling or {}).get("rope_type") != PROPORTIONAL:
        said.append("partial_rotary_factor")
    numbers = {key: value for key, value in (scaling or {}).items() if key not in said}
    rope_type = numbers.pop("rope_type", None) or (scaling or {}).get("type") or "default"
    rope_type = {"su": "longrope"}.get(rope_type, rope_type)
    return {"rope_type": rope_type, **(numbers if rope_type != "default" else {})}
