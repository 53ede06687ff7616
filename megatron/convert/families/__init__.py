"""The families, by Hugging Face's model_type."""

from typing import Dict

from megatron.convert.families.base import Family
from megatron.convert.families.llama import Llama

FAMILIES: Dict[str, Family] = {family.model_type: family for family in (Llama(),)}
"""In the order in which export prefers them."""

__all__ = ["FAMILIES", "Family"]
