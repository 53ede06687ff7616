"""The families, by Hugging Face's model_type."""

from typing import Dict

from megatron.convert.families.base import Family
from megatron.convert.families.gemma import Gemma, Gemma2, Gemma3Text
from megatron.convert.families.gemma4 import Gemma4Text
from megatron.convert.families.gpt_neox import GPTNeoX
from megatron.convert.families.granite import Granite
from megatron.convert.families.llama import Llama
from megatron.convert.families.mistral import Ministral, Mistral
from megatron.convert.families.mixtral import Mixtral
from megatron.convert.families.olmo2 import Olmo2
from megatron.convert.families.phi import Phi
from megatron.convert.families.qwen import Qwen2, Qwen3
from megatron.convert.families.smollm3 import SmolLM3

FAMILIES: Dict[str, Family] = {
    family.model_type: family
    for family in (
        Llama(),
        Mistral(),
        Ministral(),
        Qwen2(),
        Qwen3(),
        SmolLM3(),
        Granite(),
        Mixtral(),
        Gemma(),
        Gemma2(),
        Gemma3Text(),
        Gemma4Text(),
        Olmo2(),
        Phi(),
        GPTNeoX(),
    )
}
"""In the order in which export prefers them."""

__all__ = ["FAMILIES", "Family"]
