"""Transformer Engine itself: the only file that imports it. Everything else of this package takes its names from here.

Written for 1.12 and 2.x. What differs between them is asked of the classes (`accepts`, STEPPED_INFERENCE) and not of
the version number, and arguments are passed by keyword only, because their order differs too.

Importing this file raises BackendError where Transformer Engine is missing or does not load.
"""

import importlib.util
import inspect

from megatron.errors import BackendError

INSTALL = "pip install --no-build-isolation -r requirements/requirements-te.txt"
"""Needs an NVIDIA GPU, CUDA and its compiler: one part of the package is built on the spot."""

try:
    import transformer_engine
    import transformer_engine.pytorch
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch import (
        DotProductAttention,
        InferenceParams,
        LayerNorm,
        LayerNormMLP,
        Linear,
        MultiheadAttention,
        RMSNorm,
        fp8_autocast,
    )
except ModuleNotFoundError as error:
    raise BackendError(
        f"te_* settings and te_ norms need Transformer Engine, and {error.name} is not installed: {INSTALL}; or "
        "remove them"
    ) from error
except (ImportError, OSError, RuntimeError, AssertionError) as error:
    raise BackendError(
        f"te_* settings and te_ norms need Transformer Engine, which is installed but does not load ({error}); "
        f"reinstall it for this torch and CUDA ({INSTALL}), or remove them"
    ) from error

VERSION = str(getattr(transformer_engine, "__version__", "unknown"))

STEPPED_INFERENCE = hasattr(InferenceParams, "pre_step")
"""The cache is told of every step before it (2.2 and later); else its position is advanced by hand."""

READS_PICKLED_STATE = importlib.util.find_spec("transformer_engine.pytorch._extra_state") is None
"""FP8 scaling factors are set from a pickle's bytes; later versions (2.20) no longer take them."""


def accepts(function_or_class, keyword: str) -> bool:
    """Whether this version's constructor or function has an argument of that name."""
    return keyword in inspect.signature(function_or_class).parameters


__all__ = [
    "INSTALL",
    "READS_PICKLED_STATE",
    "STEPPED_INFERENCE",
    "VERSION",
    "DelayedScaling",
    "DotProductAttention",
    "Format",
    "InferenceParams",
    "LayerNorm",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "accepts",
    "fp8_autocast",
]
