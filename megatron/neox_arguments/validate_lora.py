"""What is wrong with adapters. Each check yields messages."""

from typing import Any, Iterator

from megatron.errors import ConfigError
from megatron.neox_arguments.lora import lora_settings
from megatron.neox_arguments.support import TE_LAYERS


def _lora(settings: Any) -> Iterator[str]:
    if settings.lora is None:
        return
    try:
        lora_settings(settings)
    except ConfigError as error:
        yield from error.problems
    for name in TE_LAYERS:
        if getattr(settings, name):
            yield f"lora: {name}=True leaves projections to Transformer Engine, which have no adapters; remove {name}"
    if settings.log_head_diagnostics:
        yield (
            f"log_head_diagnostics={settings.log_head_diagnostics} measures the gradients of weights that lora "
            "freezes; remove it, and look at checkpoints with python -m tools.head_dim inspect"
        )


CHECKS = (_lora,)
"""Those of validate.py."""
