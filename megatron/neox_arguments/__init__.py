"""The configuration: NeoXArgs and what builds it. Imports no torch until a dtype is asked for."""

from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.inference import INFERENCE_OVERRIDES

__all__ = ["NeoXArgs", "INFERENCE_OVERRIDES"]
