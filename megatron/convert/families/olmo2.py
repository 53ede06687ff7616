"""Olmo2ForCausalLM: norms on the output of each part, and over all heads of queries and keys."""

from typing import Any, Dict, List

from megatron.convert.families.base import (
    Family,
    activation_of,
    common_config,
    common_settings,
    hidden_act_of,
    rope_config,
    rope_settings,
)
from megatron.convert.families.llama import ATTENTION, attention_rules, embedding_rules, mlp_rules
from megatron.convert.rules import LAYER, Rule

LAYER_NORMS = {
    "attention_output_layernorm": "post_attention_layernorm",
    "mlp_output_layernorm": "post_feedforward_layernorm",
}
"""Ours and theirs."""


class Olmo2(Family):
    """OLMo 2. Its config class has no head_dim, but the model takes one from config.json."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    fixed = dict(
        norm="rmsnorm", pos_emb="rotary", norm_placement="post", qk_norm_type="full_width", use_bias_in_mlp=False
    )
    expressed = frozenset("rms_norm_epsilon rotary_emb_base rope_scaling activation use_bias_in_attn_linear".split())

    def settings(self, config: Any) -> Dict[str, Any]:
        return {
            **common_settings(config),
            **rope_settings(config),
            **self.fixed,
            "rms_norm_epsilon": config.rms_norm_eps,
            "activation": activation_of(config.hidden_act),
            "use_bias_in_attn_linear": config.attention_bias,
        }

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        return {
            **common_config(self, neox_args, vocabulary),
            **rope_config(neox_args),
            "rms_norm_eps": neox_args.rms_norm_epsilon,
            "hidden_act": hidden_act_of(neox_args),
            "attention_bias": neox_args.use_bias_in_attn_linear,
        }

    def rules(self, neox_args) -> List[Rule]:
        norms = [
            Rule(LAYER, f"{ours}.scale", f"model.layers.{{i}}.{theirs}.weight", "h")
            for ours, theirs in LAYER_NORMS.items()
        ]
        norms += [
            Rule(LAYER, f"attention.{x}_layernorm.scale", f"{ATTENTION}{x}_norm.weight", shape)
            for x, shape in (("q", "nd"), ("k", "md"))
        ]
        return [*embedding_rules(neox_args), *norms, *attention_rules(neox_args), *mlp_rules(neox_args)]
