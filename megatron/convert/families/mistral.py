"""MistralForCausalLM: Mistral 7B, Nemo, Small. The plain layer of Llama's that any hidden size may have."""

from typing import Any, Dict, List

from megatron.convert.families.llama import LlamaLike


class Mistral(LlamaLike):
    """One window for all layers, or none."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    expressed = LlamaLike.plain | {"sliding_window_width", "layer_types"}

    def settings(self, config: Any) -> Dict[str, Any]:
        window = config.sliding_window
        return {**super().settings(config), "sliding_window_width": None if window is None else window - 1}

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        window = neox_args.layer_attention().window
        return {**super().config(neox_args, vocabulary), "sliding_window": None if window is None else window + 1}

    def import_problems(self, config: Any) -> List[str]:
        types = set(getattr(config, "layer_types", None) or [])
        expected = {"full_attention" if config.sliding_window is None else "sliding_attention"}
        if types and types != expected:
            return [
                f"layer_types={config.layer_types} with sliding_window={config.sliding_window}: a {self.architecture} "
                "of transformers ignores layer_types; model_type ministral or qwen2 has them"
            ]
        return []

    def further_refusals(self, neox_args) -> List[str]:
        problems = super().further_refusals(neox_args)
        if len(set(neox_args.layer_types)) > 1:
            problems.append(
                f"layer_types={neox_args.layer_types}: a {self.architecture} has one window for all layers, or none"
            )
        return problems
