"""Write a YAML from a Hugging Face config.json: every setting of the model, none of a run.

    python -m tools.head_dim from-hf config.json|HF_DIR [-o OUT.yml]

Without -o it is printed. Weights are not looked at: tools/ckpts/convert_hf_to_neox.py converts them too. Exit status 2
if no model here can be that one; every reason is named.
"""

import argparse
import os
import sys
from typing import Any, Dict, Iterator

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.per_layer import layers_text
from tools.head_dim import published
from tools.head_dim.subject import CONFIG_JSON, numbers_of, read_json


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("path", metavar="PATH", help="a config.json, or a folder with one")
    parser.add_argument("-o", "--output", metavar="OUT.yml", help="the file to write; it must not be there")


def run(options: argparse.Namespace) -> int:
    """Returns 0; raises what main prints."""
    text = yaml_text(options.path)
    if options.output is None:
        sys.stdout.write(text)
        return 0
    try:
        with open(options.output, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--output {options.output}: there is such a file; name another one, or remove it") from None
    return 0


def yaml_text(path: str) -> str:
    """The settings of the model as a YAML file, with a heading that says which published model it is.

    Raises ConversionError or ConfigError if no model here can be that one.
    """
    whole = read_json(os.path.join(path, CONFIG_JSON) if os.path.isdir(path) else path)
    from megatron.convert.families import FAMILIES  # imports transformers, for which a wrong path need not wait
    from megatron.convert.families.composite import language_model
    from megatron.convert.families.config_file import read_config
    from megatron.convert.model_args import arguments_of
    from megatron.convert.yaml_text import yaml_lines

    raw = language_model(whole)
    config = read_config(raw)
    settings: Dict[str, Any] = FAMILIES[raw["model_type"]].settings(config)
    args = arguments_of({**settings, "padded_vocab_size": config.vocab_size})
    numbers = numbers_of(args)
    model = published.closest(numbers)
    known = f" The geometry is that of {model.name}." if model and not published.differences(numbers, model) else ""
    return (
        f"# From the config.json of a {raw['model_type']} model.{known}\n"
        f"{''.join(_heads(args))}"
        f"# Its vocabulary has {config.vocab_size} rows: give padded_vocab_size where the tokenizer has fewer tokens.\n"
        f"{yaml_lines(settings)}"
    )


def _heads(args: NeoXArgs) -> Iterator[str]:
    """A line for each kind of layers."""
    kinds = args.layers_by_geometry()
    for geometry, numbers in kinds.items():
        where = "" if len(kinds) == 1 else f"{layers_text(numbers).capitalize()}: "
        yield (
            f"# {where}{geometry.num_attention_heads} heads of {geometry.head_dim}: a query width of "
            f"{geometry.query_hidden_size} on a residual stream of {geometry.hidden_size}.\n"
        )
