"""Which way of generating the config asks for (text_gen_type), with the config's settings."""

from typing import Any, Dict, List, Optional

from megatron.errors import ConfigError
from megatron.neox_arguments.fields import defaults
from megatron.text_generation.collective import from_rank_0
from megatron.text_generation.prompts import read_prompts, tokenize_prompt
from megatron.text_generation.runner import check_cache_settings
from megatron.text_generation.samples import (
    generate_samples_input_from_file,
    generate_samples_interactive,
    generate_samples_unconditional,
)
from megatron.text_generation.sampling import SamplingSettings
from megatron.text_generation.stream import end_of_generation

_SAMPLING = ("temperature", "top_k", "top_p")


def generate(neox_args, model) -> Optional[List[Dict[str, Any]]]:
    """Generate as text_gen_type says; returns the records, or None after an interactive session.

    Raises what `check_request` raises.
    """
    settings = {name: getattr(neox_args, name) for name in ("maximum_tokens", "recompute", *_SAMPLING)}
    return _mode(neox_args)(neox_args, model, settings)


def check_request(neox_args) -> None:
    """Find what is wrong with the settings and the prompts without a model. All ranks must call it.

    Raises ConfigError for settings, DataError for a prompt file or prompt that cannot be used.
    """
    _mode(neox_args)
    SamplingSettings(*(getattr(neox_args, name) for name in _SAMPLING))
    check_cache_settings(neox_args, use_cache=not neox_args.recompute)
    end_of_generation(neox_args, 1, neox_args.maximum_tokens)
    if neox_args.text_gen_type == "input-file":
        from_rank_0(lambda: _check_prompt_file(neox_args))


def _check_prompt_file(neox_args) -> None:
    for prompt in read_prompts(neox_args.sample_input_file, neox_args.prompt_end):
        tokenize_prompt(neox_args, prompt, neox_args.tokenizer.eod)


def _mode(neox_args):
    modes = {"unconditional": _unconditional, "input-file": _input_file, "interactive": _interactive}
    if neox_args.text_gen_type not in modes:
        raise ConfigError(
            f"text_gen_type={neox_args.text_gen_type!r} is not one of {', '.join(modes)}; set one of them"
        )
    return modes[neox_args.text_gen_type]


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
