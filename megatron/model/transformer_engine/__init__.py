"""NVIDIA Transformer Engine behind the interfaces of our own layers; the only package that imports it.

Names are looked up when they are used: `from megatron.model.transformer_engine import te_norm` raises BackendError
where Transformer Engine is not installed.
"""

import importlib

_HOME = {
    "TEColumnParallelLinear": "linear",
    "TELayerCache": "inference",
    "TELayerNorm": "norms",
    "TELayerNormMLP": "mlp",
    "TEMultiheadAttention": "attention",
    "TERMSNorm": "norms",
    "TERowParallelLinear": "linear",
    "fp8_context": "fp8",
    "fp8_recipe": "fp8",
    "te_layer_cache": "inference",
    "te_norm": "norms",
}
"""Name -> the module of this package that defines it."""


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
