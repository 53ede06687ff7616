"""The patch, one module per file (or kind of file) of the checkout."""

from tools.neox_patch.change import Patch
from tools.neox_patch.changes import (
    arguments,
    attention,
    attention_norms,
    checkpoints,
    converters,
    converters_import,
    converters_weights,
    documents,
    flops,
    rpe,
    transformer_engine,
)


def whole_patch() -> Patch:
    """Everything that is changed and added, in the order in which a reader should see it."""
    patch = Patch()
    core = (arguments, documents, attention, attention_norms, transformer_engine, rpe)
    for module in (*core, flops, checkpoints, converters, converters_weights, converters_import):
        patch.changes += getattr(module, "CHANGES", [])
        patch.texts += getattr(module, "TEXTS", [])
        patch.files += getattr(module, "FILES", [])
    return patch
