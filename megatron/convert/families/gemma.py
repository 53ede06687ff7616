"""Gemma 1, 2 and 3 (text): norms that multiply by 1 + weight, embeddings times sqrt(hidden_size), tanh gelu as gate."""

from types import SimpleNamespace
from typing import Any, Dict, List, Optional

import numpy as np

from megatron.convert.families.base import (
    activation_of,
    common_config,
    common_settings,
    hidden_act_of,
    refuse,
    scale_setting,
)
from megatron.convert.families.llama import ATTENTION, LlamaLike, attention_rules, embedding_rules, mlp_rules
from megatron.convert.families.rope import rope_config, rope_settings, rotary_problems, whole_rotation_problems
from megatron.convert.families.windows import window_problems, window_settings
from megatron.convert.rules import LAYER, Rule
from megatron.neox_arguments.layer_types import LAYER_TYPES, is_by_layer_type

LAYER_NORMS = {
    "input_layernorm": "input_layernorm",
    "attention_output_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_layernorm": "post_feedforward_layernorm",
}
"""Our names of a sandwich layer's norms, and theirs. Their post_attention_layernorm is not where ours is."""

UNUSED_WINDOW = 4096
"""sliding_window of a model whose layers have none: transformers makes the mask nevertheless and needs a number."""


class Gemma(LlamaLike):
    """GemmaForCausalLM. head_dim is 256 where config.json has none."""

    model_type = "gemma"
    architecture = "GemmaForCausalLM"
    fixed = dict(norm="rmsnorm", pos_emb="rotary", zero_centered_gamma=True, use_bias_in_mlp=False)
    expressed = LlamaLike.plain | {"use_bias_in_attn_linear", "embedding_multiplier"}
    activation_key = "hidden_act"

    def settings(self, config: Any) -> Dict[str, Any]:
        refuse([*self.rotary_import_problems(config), *self.import_problems(config)])
        return {
            **common_settings(config),
            **self.rope_settings(config),
            **self.fixed,
            "rms_norm_epsilon": config.rms_norm_eps,
            "activation": activation_of(getattr(config, self.activation_key)),
            "use_bias_in_attn_linear": config.attention_bias,
            "embedding_multiplier": config.hidden_size**0.5,
        }

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        return {
            **common_config(self, neox_args, vocabulary),
            **self.rope_config(neox_args),
            "rms_norm_eps": neox_args.rms_norm_epsilon,
            self.activation_key: hidden_act_of(neox_args),
            "attention_bias": neox_args.use_bias_in_attn_linear,
        }

    def rope_settings(self, config: Any) -> Dict[str, Any]:
        """The rotary settings."""
        return rope_settings(config)

    def rope_config(self, neox_args) -> Dict[str, Any]:
        """Inverse of rope_settings."""
        return rope_config(neox_args)

    def rotary_import_problems(self, config: Any) -> List[str]:
        """What rope_parameters say and the class does not do."""
        return whole_rotation_problems(config, self.architecture)

    def rotary_refusals(self, neox_args) -> List[str]:
        """What of our rotary settings the class does not do."""
        return rotary_problems(neox_args, self.architecture)

    def import_problems(self, config: Any) -> List[str]:
        problems = []
        if getattr(config, "use_bidirectional_attention", None):
            problems.append("use_bidirectional_attention=True: attention is causal here, tokens see those before them")
        named = {key: getattr(config, key, None) for key in ("hidden_act", "hidden_activation")}
        if len({act for act in named.values() if act is not None}) > 1:
            problems.append(
                f"hidden_act={named['hidden_act']} and hidden_activation={named['hidden_activation']}: which of them a "
                "Gemma uses depends on the version of transformers; make them equal in config.json"
            )
        return problems

    def further_refusals(self, neox_args) -> List[str]:
        problems = super(LlamaLike, self).further_refusals(neox_args) + self.rotary_refusals(neox_args)
        given, wanted = neox_args.embedding_multiplier, neox_args.hidden_size**0.5
        if given is None or np.float32(given) != np.float32(wanted):  # both models round it to fp32 or less
            problems.append(
                f"embedding_multiplier={given}: a {self.architecture} multiplies by the root of hidden_size, {wanted}"
            )
        return problems


class Gemma2(Gemma):
    """Gemma2ForCausalLM: norms before and after each part, soft caps, windows in some layers, a scale of its own.

    query_pre_attn_scalar q is softmax_scale q^(-1/2); softmax_scale stays unset where that is the default.
    """

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    fixed = dict(**Gemma.fixed, norm_placement="sandwich")
    expressed = Gemma.expressed | frozenset(
        "softmax_scale layer_types sliding_window_width attn_logit_softcap final_logit_softcap".split()
    )
    activation_key = "hidden_activation"

    def settings(self, config: Any) -> Dict[str, Any]:
        return {
            **super().settings(config),
            **window_settings(config),
            **scale_setting(config, config.query_pre_attn_scalar**-0.5),
            "attn_logit_softcap": config.attn_logit_softcapping,
            "final_logit_softcap": config.final_logit_softcapping,
        }

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        window = neox_args.sliding_window_width
        return {
            **super().config(neox_args, vocabulary),
            "layer_types": list(neox_args.layer_types),
            "sliding_window": UNUSED_WINDOW if window is None else window + 1,
            "query_pre_attn_scalar": query_pre_attn_scalar(neox_args),
            "attn_logit_softcapping": neox_args.attn_logit_softcap,
            "final_logit_softcapping": neox_args.final_logit_softcap,
        }

    def import_problems(self, config: Any) -> List[str]:
        return super().import_problems(config) + window_problems(config)

    def further_refusals(self, neox_args) -> List[str]:
        problems = super().further_refusals(neox_args)
        geometry, scale = neox_args.head_geometry(), neox_args.attention_scale()
        if geometry.hidden_size % geometry.num_attention_heads:
            problems.append(
                f"hidden_size={geometry.hidden_size} with num_attention_heads={geometry.num_attention_heads}: "
                f"transformers' {self.architecture} refuses a hidden size that is no multiple of the heads, even with "
                "head_dim"
            )
        if query_pre_attn_scalar(neox_args) is None:
            problems.append(
                f"softmax_scale={scale}: a {self.architecture} has 1/sqrt of a whole number "
                f"(query_pre_attn_scalar); the nearest is {max(1, round(scale**-2)) ** -0.5!r}"
            )
        return problems

    def rules(self, neox_args) -> List[Rule]:
        norms = [
            Rule(LAYER, f"{ours}.scale", f"model.layers.{{i}}.{theirs}.weight", "h")
            for ours, theirs in LAYER_NORMS.items()
        ]
        return [*embedding_rules(neox_args), *norms, *attention_rules(neox_args), *mlp_rules(neox_args)]


class Gemma3Text(Gemma2):
    """Gemma3ForCausalLM, the text model alone: norms over each head, a rotary base for each layer type, no cap on
    the scores."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    fixed = dict(**Gemma2.fixed, qk_norm_type="per_head")
    expressed = Gemma2.expressed - {"attn_logit_softcap"}

    def settings(self, config: Any) -> Dict[str, Any]:
        settings = super().settings(config)
        del settings["attn_logit_softcap"]
        return settings

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        return {**super().config(neox_args, vocabulary), "attn_logit_softcapping": None}

    def rope_settings(self, config: Any) -> Dict[str, Any]:
        """By layer type; plain ones where both types agree."""
        by_type = {layer_type: rope_settings(view) for layer_type, view in _views(config).items()}
        return {name: _joined({key: one[name] for key, one in by_type.items()}) for name in by_type[LAYER_TYPES[0]]}

    def rope_config(self, neox_args) -> Dict[str, Any]:
        bases, scalings = _by_type(neox_args.rotary_emb_base), _by_type(neox_args.rope_scaling)
        any_base = next(iter(bases.values()))  # for a type that no layer has
        return {
            "rope_parameters": {
                layer_type: {
                    **(scalings.get(layer_type) or {"rope_type": "default"}),
                    "rope_theta": float(bases.get(layer_type, any_base)),
                }
                for layer_type in LAYER_TYPES
            }
        }

    def rotary_import_problems(self, config: Any) -> List[str]:
        others = sorted(set(config.rope_parameters) - set(LAYER_TYPES))
        if others:
            return [
                f"rope_parameters={config.rope_parameters}: transformers does not use {', '.join(others)} beside "
                f"{' and '.join(LAYER_TYPES)}; write each of these two its own"
            ]
        missing = [key for key in LAYER_TYPES if key in config.layer_types and not config.rope_parameters.get(key)]
        if missing:
            return [f"rope_parameters={config.rope_parameters} has none for {missing[0]}, of which there are layers"]
        problems = []
        for layer_type, view in _views(config).items():
            problems += whole_rotation_problems(view, self.architecture)
            if view.rope_parameters.get("rope_type") == "dynamic":
                problems.append(f"rope_parameters.{layer_type}: rope_type=dynamic by layer type is not converted")
        return problems

    def rotary_refusals(self, neox_args) -> List[str]:
        rotary = (neox_args.layer_attention(number).rotary for number in range(neox_args.num_layers))
        if any(one and one.scaling and one.scaling.rope_type == "dynamic" for one in rotary):
            return [f"rope_scaling={neox_args.rope_scaling}: type dynamic by layer type is not converted"]
        return []

    def import_problems(self, config: Any) -> List[str]:
        problems = super().import_problems(config)
        if config.attn_logit_softcapping is not None:
            problems.append(
                f"attn_logit_softcapping={config.attn_logit_softcapping}: transformers' Gemma3ForCausalLM does not "
                "apply it; set it to null in config.json for the model that transformers computes"
            )
        return problems

    def rules(self, neox_args) -> List[Rule]:
        norms = [Rule(LAYER, f"attention.{x}_layernorm.scale", f"{ATTENTION}{x}_norm.weight", "d") for x in "qk"]
        return [*super().rules(neox_args), *norms]


def query_pre_attn_scalar(neox_args) -> Optional[int]:
    """The whole number q whose q^(-1/2) is the attention scale, exactly; None if there is none."""
    scale = neox_args.attention_scale()
    scalar = round(scale**-2)
    return scalar if scalar > 0 and scalar**-0.5 == scale else None


def _views(config: Any) -> Dict[str, Any]:
    """For each layer type, what looks like a config that has its rope_parameters for all layers; for a type that no
    layer has, those of the other if it has none."""
    given = {key: config.rope_parameters[key] for key in LAYER_TYPES if config.rope_parameters.get(key)}
    any_given = next(iter(given.values()))
    return {key: SimpleNamespace(rope_parameters=given.get(key, any_given)) for key in LAYER_TYPES}


def _joined(by_type: Dict[str, Any]) -> Any:
    """One value if the types agree, else the mapping, without those that have none."""
    first, second = by_type.values()
    return first if first == second else {key: value for key, value in by_type.items() if value is not None}


def _by_type(setting: Any) -> Dict[str, Any]:
    return setting if is_by_layer_type(setting) else dict.fromkeys(LAYER_TYPES, setting)
