"""Which way of generating the config asks for (text_gen_type), with the config's settings."""

from typing import Any, Dict, List, Optional

from megatron.errors import ConfigError
from megatron.neox_arguments.fields import defaults
from megatron.text_generation.samples import (
    generate_samples_input_from_file,
    generate_samples_interactive,
    generate_samples_unconditional,
)

_SAMPLING = ("maximum_tokens", "recompute", "temperature", "top_k", "top_p")


def generate(neox_args, model) -> Optional[List[Dict[str, Any]]]:
    """Generate as text_gen_type says; returns the records, or None after an interactive session."""
    settings = {name: getattr(neox_args, name) for name in _SAMPLING}
    modes = {"unconditional": _unconditional, "input-file": _input_file, "interactive": _interactive}
    mode = modes.get(neox_args.text_gen_type)
    if mode is None:
        raise ConfigError(
            f"text_gen_type={neox_args.text_gen_type!r} is not one of {', '.join(modes)}; set one of them"
        )
    return mode(neox_args, model, settings)


def _unconditional(neox_args, model, settings):
    return generate_samples_unconditional(
        neox_args, model, neox_args.num_samples, neox_args.sample_output_file, **settings
    )


def _input_file(neox_args, model, settings):
    output_file = neox_args.sample_output_file
    if output_file == defaults()["sample_output_file"]:
        output_file = None  # not set: a name derived from the prompts' file, next to it
    return generate_samples_input_from_file(
        neox_args, model, neox_args.sample_input_file, output_file, prompt_end=neox_args.prompt_end, **settings
    )


def _interactive(neox_args, model, settings):
    return generate_samples_interactive(neox_args, model, prompt_end=neox_args.prompt_end, **settings)
