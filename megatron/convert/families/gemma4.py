"""Gemma 4, the dense text model: wide heads with fewer keys in the global layers, whose keys can be values too."""

from itertools import groupby
from typing import Any, Dict, List, Union

from megatron.convert.families.base import refuse
from megatron.convert.families.gemma import Gemma, Gemma3Text
from megatron.convert.families.windows import window_problems, window_settings
from megatron.convert.rules import LAYER, Rule
from megatron.geometry import HeadGeometry
from megatron.neox_arguments.layer_types import LAYER_TYPES

FULL, SLIDING = LAYER_TYPES
_WIDTHS = {"head_dim": "head_dim", "num_kv_heads": "num_key_value_heads"}
"""Our names of what differs from layer to layer, and theirs."""
_NOT_BUILT = {
    "hidden_size_per_layer_input": "embeddings for each layer are not built; only 0 can be held (absent means 256)",
    "num_kv_shared_layers": "layers that use another layer's keys and values are not built; only 0 can be held",
    "use_double_wide_mlp": "wider MLPs in layers that share keys and values are not built; only false can be held",
    "enable_moe_block": "mixture of experts is not built; only false can be held",
}


class Gemma4Text(Gemma3Text):
    """Gemma4ForCausalLM: head_dim and key heads by layer type, keys that are values too in the global layers, scores
    that are not scaled, a norm without weights on values, and a number by which each layer's output is multiplied.

    use_bidirectional_attention "vision" only concerns images, so a text model computes the same without.
    """

    model_type = "gemma4_text"
    architecture = "Gemma4ForCausalLM"
    fixed = dict(Gemma3Text.fixed, zero_centered_gamma=False, v_norm=True, layer_scalar=True)
    expressed = Gemma3Text.expressed | {"shared_key_value"}
    by_layer = True

    def settings(self, config: Any) -> Dict[str, Any]:
        refuse(_import_width_problems(config))
        layers = [config.per_layer_config[number] for number in range(config.num_hidden_layers)]
        return {
            **Gemma.settings(self, layers[0]),
            **{ours: as_setting([getattr(layer, theirs) for layer in layers]) for ours, theirs in _WIDTHS.items()},
            **window_settings(config),
            "softmax_scale": 1.0,
            "shared_key_value": {FULL: True} if config.attention_k_eq_v else False,
            "final_logit_softcap": config.final_logit_softcapping,
        }

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        window, types = neox_args.sliding_window_width, list(neox_args.layer_types)
        by_type = _by_type(neox_args)
        everywhere, in_full = by_type.get(SLIDING, by_type[FULL]), by_type[FULL]
        widths = {"head_dim": everywhere.head_dim, "num_key_value_heads": everywhere.num_kv_heads}
        full_widths = {"head_dim": in_full.head_dim, "num_key_value_heads": in_full.num_kv_heads}
        overrides = {key: value for key, value in full_widths.items() if value != widths[key]}
        full_layers = [number for number, layer_type in enumerate(types) if layer_type == FULL and overrides]
        digits = len(str(max(full_layers, default=0)))
        theirs = {
            **Gemma.config(self, neox_args, vocabulary),
            **widths,
            "per_layer_config": {f"{number:0{digits}}": dict(overrides) for number in full_layers},
            # The same for versions before per_layer_config.
            "global_head_dim": in_full.head_dim,
            "num_global_key_value_heads": in_full.num_kv_heads,
            "attention_k_eq_v": in_full.shared_key_value,
            "layer_types": types,
            "final_logit_softcapping": neox_args.final_logit_softcap,
            **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), 0),
            **dict.fromkeys(("use_double_wide_mlp", "enable_moe_block"), False),
        }
        return theirs if window is None else {**theirs, "sliding_window": window + 1}

    def import_problems(self, config: Any) -> List[str]:
        problems = [f"{key}={getattr(config, key)}: {why}" for key, why in _NOT_BUILT.items() if getattr(config, key)]
        if config.use_bidirectional_attention == "all":
            problems.append("use_bidirectional_attention=all: attention is causal here, tokens see those before them")
        return problems + window_problems(config)

    def further_refusals(self, neox_args) -> List[str]:
        problems = Gemma.further_refusals(self, neox_args)
        scales = {neox_args.attention_scale(number) for number in range(neox_args.num_layers)}
        if scales != {1.0}:
            problems.append(
                f"softmax_scale={neox_args.softmax_scale}: a {self.architecture} does not scale scores, 1.0"
            )
        if neox_args.layer_types[-1] != FULL:
            problems.append(f"layer_types ends with {SLIDING}: the last layer of a {self.architecture} is {FULL}")
        return problems + self._width_refusals(neox_args)

    def _width_refusals(self, neox_args) -> List[str]:
        problems = []
        for layer_type in LAYER_TYPES:
            geometries = _geometries(neox_args, layer_type)
            if len(set(geometries)) > 1:
                problems.append(
                    f"head_dim={neox_args.head_dim}, num_kv_heads={neox_args.num_kv_heads}: a {self.architecture} has "
                    f"the same heads in all layers of type {layer_type}"
                )
        if any(geometry.shared_key_value for geometry in _geometries(neox_args, SLIDING)):
            problems.append(
                f"shared_key_value={neox_args.shared_key_value}: a {self.architecture} has it in layers of type {FULL} "
                "only (attention_k_eq_v)"
            )
        return problems

    def rules(self, neox_args) -> List[Rule]:
        return [*super().rules(neox_args), Rule(LAYER, "layer_scalar", "model.layers.{i}.layer_scalar", "1")]


def as_setting(values: List[int]) -> Union[int, list]:
    """One value for each layer as a setting: the value that all have, else a pattern that repeats, else runs."""
    for length in range(1, len(values)):
        if all(value == values[number % length] for number, value in enumerate(values)):
            return values[0] if length == 1 else [[values[:length], "all"]]
    runs = [[value, len(list(run))] for value, run in groupby(values)]
    return runs if len(runs) > 1 else values[0]


def _import_width_problems(config: Any) -> List[str]:
    overrides = config.to_dict().get("per_layer_config") or {}
    odd = sorted({key for layer in overrides.values() for key in layer} - set(_WIDTHS.values()))
    return [
        f"per_layer_config has {key}: layers differ in {' and '.join(_WIDTHS.values())} only; remove it" for key in odd
    ]


def _geometries(neox_args, layer_type: str) -> List[HeadGeometry]:
    types = enumerate(neox_args.layer_types)
    return [neox_args.head_geometry(number) for number, each in types if each == layer_type]


def _by_type(neox_args) -> Dict[str, HeadGeometry]:
    found = {layer_type: _geometries(neox_args, layer_type) for layer_type in LAYER_TYPES}
    return {layer_type: geometries[0] for layer_type, geometries in found.items() if geometries}
