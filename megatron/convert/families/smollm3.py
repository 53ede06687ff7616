"""SmolLM3ForCausalLM: some layers have no rotary positions."""

from typing import Any, Dict, List

from megatron.convert.families.llama import BIASES
from megatron.convert.families.windows import Windowed


class SmolLM3(Windowed):
    """Layers without rotary positions, with or without a window."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    expressed = Windowed.expressed | {*BIASES.values(), "no_rope_layers"}
    bias_keys = BIASES

    def settings(self, config: Any) -> Dict[str, Any]:
        flags = [int(flag) for flag in config.no_rope_layers[: config.num_hidden_layers]]
        return {**super().settings(config), "no_rope_layers": None if all(flags) else flags}

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        keys = super().config(neox_args, vocabulary)
        del keys["max_window_layers"]
        return {**keys, "no_rope_layers": neox_args.no_rope_layers or [1] * neox_args.num_layers}

    def import_problems(self, config: Any) -> List[str]:
        problems = super().import_problems(config)
        if len(config.no_rope_layers) < config.num_hidden_layers:
            problems.append(
                f"no_rope_layers has {len(config.no_rope_layers)} entries for num_hidden_layers="
                f"{config.num_hidden_layers}; it must have one for each layer"
            )
        return problems
