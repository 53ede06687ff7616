"""Generation of text with a trained model."""

from megatron.text_generation.runner import InferenceRunner
from megatron.text_generation.samples import (
    generate_samples_from_prompt,
    generate_samples_input_from_file,
    generate_samples_interactive,
    generate_samples_unconditional,
)
from megatron.text_generation.sampling import SamplingSettings, choose_tokens, filter_logits
from megatron.text_generation.stream import stream_tokens

__all__ = [
    "InferenceRunner",
    "SamplingSettings",
    "choose_tokens",
    "filter_logits",
    "generate_samples_from_prompt",
    "generate_samples_input_from_file",
    "generate_samples_interactive",
    "generate_samples_unconditional",
    "stream_tokens",
]
