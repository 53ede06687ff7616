"""python -m tools.head_dim COMMAND: choose, check and cost the width of attention heads. See COMMAND --help."""

import argparse
import importlib
import os
import sys
from typing import Optional, Sequence

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported: no GPU is needed or used

from megatron.errors import NeoXError  # noqa: E402

COMMANDS = {
    "plan": "what a config costs, whether it fits, and what each backend does with its head_dim",
    "verify": "compare a config, a Hugging Face folder or a checkpoint with published models",
    "from-hf": "write a YAML from a Hugging Face config.json",
    "inspect": "what the heads of a checkpoint do with a text: figures, a picture, and what is unusual",
    "wavelengths": "how fast each rotary pair turns, beside the length of the text",
    "sweep": "train the same small model at several head_dims, or other settings, and compare",
    "claims": "what an article says about wide heads, tried on small models: seen here, or not",
    "suggest": "heuristics for choosing head_dim, with their sources",
}
"""Each is a module of this package with `arguments(parser)` and `run(options) -> exit status`."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command; returns the exit status: 0, 1 as the command says, 2 if it could not do its work."""
    options = _parser(arguments).parse_args(arguments)
    try:
        status = _module(options.command).run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it ends
        return 0
    except (NeoXError, OSError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2


def _parser(arguments: Optional[Sequence[str]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.head_dim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = set(sys.argv[1:] if arguments is None else arguments)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in asked:  # what others import is not needed
            module = _module(name)
            command.description = module.__doc__
            module.arguments(command)
    return parser


def _module(command: str):
    return importlib.import_module(f"tools.head_dim.{command.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
