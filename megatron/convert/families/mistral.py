"""MistralForCausalLM (Mistral 7B, Nemo, Small): Llama's plain layer, at any hidden size. MinistralForCausalLM: the same
with a window in some layers."""

from typing import Any, Dict, List

from megatron.convert.families.llama import LlamaLike
from megatron.convert.families.windows import Windowed


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
                "of transformers ignores layer_types; a MinistralForCausalLM, model_type ministral, has them"
            ]
        return []

    def further_refusals(self, neox_args) -> List[str]:
        problems = super().further_refusals(neox_args)
        if len(set(neox_args.layer_types)) > 1:
            problems.append(
                f"layer_types={neox_args.layer_types}: a {self.architecture} has one window for all layers, or none"
            )
        return problems


UNUSED_WINDOW = 4096
"""sliding_window of a Ministral whose layers have none: transformers makes the mask nevertheless and needs a number."""


class Ministral(Windowed):
    """A window where layer_types says so. transformers itself needs head_dim in config.json."""

    model_type = "ministral"
    architecture = "MinistralForCausalLM"

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        keys = super().config(neox_args, vocabulary)
        del keys["use_sliding_window"], keys["max_window_layers"]
        return {**keys, "sliding_window": keys["sliding_window"] or UNUSED_WINDOW}
