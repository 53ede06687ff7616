"""Qwen2ForCausalLM and Qwen3ForCausalLM: windows by layer_types; a bias on queries, keys and values, or norms."""

from typing import List

from megatron.convert.families.llama import ATTENTION, LlamaLike
from megatron.convert.families.windows import Windowed
from megatron.convert.rules import LAYER, Rule


class Qwen2(Windowed):
    """Qwen 2 and 2.5: query, key and value have a bias, the output projection has none."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    fixed = dict(LlamaLike.fixed, add_qkv_bias=True)


class Qwen3(Windowed):
    """Norms over each head of queries and of keys. head_dim is 128 where config.json has none."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    fixed = dict(LlamaLike.fixed, qk_norm_type="per_head")
    expressed = Windowed.expressed | {"use_bias_in_attn_linear"}
    bias_keys = {"attention_bias": "use_bias_in_attn_linear"}

    def rules(self, neox_args) -> List[Rule]:
        norms = [Rule(LAYER, f"attention.{x}_layernorm.scale", f"{ATTENTION}{x}_norm.weight", "d") for x in "qk"]
        return [*super().rules(neox_args), *norms]
