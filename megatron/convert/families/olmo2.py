"""Olmo2ForCausalLM: norms on the output of each part, and over all heads of queries and keys."""

from typing import List

from megatron.convert.families.llama import ATTENTION, LlamaLike, attention_rules, embedding_rules, mlp_rules
from megatron.convert.rules import LAYER, Rule

LAYER_NORMS = {
    "attention_output_layernorm": "post_attention_layernorm",
    "mlp_output_layernorm": "post_feedforward_layernorm",
}
"""Ours and theirs."""


class Olmo2(LlamaLike):
    """OLMo 2. Its config class has no head_dim, but the model takes one from config.json."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    fixed = dict(
        norm="rmsnorm", pos_emb="rotary", norm_placement="post", qk_norm_type="full_width", use_bias_in_mlp=False
    )
    expressed = LlamaLike.plain | {"use_bias_in_attn_linear"}
    bias_keys = {"attention_bias": "use_bias_in_attn_linear"}

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
