"""NVIDIA Transformer Engine behind the interfaces of our own layers; the only package that imports it.

Importing it raises BackendError where Transformer Engine is not installed.
"""

from megatron.model.transformer_engine.attention import TEMultiheadAttention
from megatron.model.transformer_engine.fp8 import fp8_context, fp8_recipe
from megatron.model.transformer_engine.inference import TELayerCache, te_layer_cache
from megatron.model.transformer_engine.linear import TEColumnParallelLinear, TERowParallelLinear
from megatron.model.transformer_engine.mlp import TELayerNormMLP
from megatron.model.transformer_engine.norms import TELayerNorm, TERMSNorm, te_norm

__all__ = [
    "TEColumnParallelLinear",
    "TELayerCache",
    "TELayerNorm",
    "TELayerNormMLP",
    "TEMultiheadAttention",
    "TERMSNorm",
    "TERowParallelLinear",
    "fp8_context",
    "fp8_recipe",
    "te_layer_cache",
    "te_norm",
]
