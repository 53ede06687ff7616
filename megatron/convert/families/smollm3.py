"""SmolLM3ForCausalLM: some layers have no rotary positions."""

from typing import Any, Dict, List

from megatron.convert.families.llama import BIASES, LlamaLike
from megatron.convert.families.windows import window_config, window_problems, window_settings


class SmolLM3(LlamaLike):
    """Layers without rotary positions, with or without a window."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    expressed = LlamaLike.plain | {*BIASES.values(), "sliding_window_width", "layer_types", "no_rope_layers"}
    bias_keys = BIASES

    def settings(self, config: Any) -> Dict[str, Any]:
        flags = [int(flag) for flag in config.no_rope_layers[: config.num_hidden_layers]]
        return {
            **super().settings(config),
            **window_settings(config),
            "no_rope_layers": None if all(flags) else flags,
        }

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        windows = window_config(neox_args)
        del windows["max_window_layers"]
        return {
            **super().config(neox_args, vocabulary),
            **windows,
            "no_rope_layers": neox_args.no_rope_layers or [1] * neox_args.num_layers,
        }

    def import_problems(self, config: Any) -> List[str]:
        if len(config.no_rope_layers) < config.num_hidden_layers:
            return [
                f"no_rope_layers has {len(config.no_rope_layers)} entries for num_hidden_layers="
                f"{config.num_hidden_layers}; it must have one for each layer"
            ]
        return window_problems(config)
