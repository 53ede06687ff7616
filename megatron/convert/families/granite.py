"""GraniteForCausalLM, as far as its multipliers can be held."""

from typing import Any, Dict, List

from megatron.convert.families.base import scale_setting
from megatron.convert.families.llama import BIASES, LlamaLike


class Granite(LlamaLike):
    """A factor on the embeddings, and an attention scale of its own in place of 1/sqrt(head_dim)."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"
    expressed = LlamaLike.plain | {*BIASES.values(), "embedding_multiplier", "softmax_scale"}
    bias_keys = BIASES

    def settings(self, config: Any) -> Dict[str, Any]:
        factor = config.embedding_multiplier
        return {
            **super().settings(config),
            **scale_setting(config, config.attention_multiplier),
            "embedding_multiplier": None if factor == 1 else factor,
        }

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        return {
            **super().config(neox_args, vocabulary),
            "attention_multiplier": neox_args.attention_scale(),
            "embedding_multiplier": neox_args.embedding_multiplier or 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        }

    def import_problems(self, config: Any) -> List[str]:
        return [
            f"{name}={getattr(config, name)}: there is no setting for a factor on {what}, and multiplying it into the "
            "weights would change them; only 1 can be held"
            for name, what in (("residual_multiplier", "what each sublayer adds"), ("logits_scaling", "the logits"))
            if getattr(config, name) != 1
        ]
