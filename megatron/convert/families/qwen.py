"""Qwen2ForCausalLM and Qwen3ForCausalLM: windows by layer_types; a bias on queries, keys and values, or norms."""

from typing import Any, Dict, List

from megatron.convert.families.llama import ATTENTION, BIASES, LlamaLike
from megatron.convert.families.windows import window_config, window_problems, window_settings
from megatron.convert.rules import LAYER, Rule


class _Windowed(LlamaLike):
    """A window in the layers that layer_types names."""

    def settings(self, config: Any) -> Dict[str, Any]:
        return {**super().settings(config), **window_settings(config)}

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        return {**super().config(neox_args, vocabulary), **window_config(neox_args)}

    def import_problems(self, config: Any) -> List[str]:
        return window_problems(config)


class Qwen2(_Windowed):
    """Qwen 2 and 2.5: query, key and value have a bias, the output projection has none."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    fixed = dict(LlamaLike.fixed, add_qkv_bias=True)
    expressed = LlamaLike.plain | {"sliding_window_width", "layer_types"}


class Qwen3(_Windowed):
    """Norms over each head of queries and of keys. head_dim is 128 where config.json has none."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    fixed = dict(LlamaLike.fixed, qk_norm_type="per_head")
    expressed = LlamaLike.plain | {"sliding_window_width", "layer_types", "use_bias_in_attn_linear"}
    bias_keys = {"attention_bias": BIASES["attention_bias"]}

    def rules(self, neox_args) -> List[Rule]:
        norms = [Rule(LAYER, f"attention.{x}_layernorm.scale", f"{ATTENTION}{x}_norm.weight", "d") for x in "qk"]
        return [*super().rules(neox_args), *norms]
