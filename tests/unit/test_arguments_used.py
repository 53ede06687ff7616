"""An argument that is said to be honoured is read somewhere: an option that is parsed and then ignored fails here."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from megatron.neox_arguments.fields import NeoXArgsDeepspeedConfig, NeoXArgsDeepspeedRunner
from megatron.neox_arguments.support import HONOURED, REFUSED

REPOSITORY = Path(__file__).resolve().parents[2]
MAINS = ("train.py", "generate.py", "eval.py", "deepy.py")
ONLY_ABOUT_ARGUMENTS = re.compile(r"neox_arguments/(fields/.*|support|render|types|loading|validate\w*)\.py$")
# These two groups are handed on as a whole, by their names.
HANDED_ON = set(NeoXArgsDeepspeedConfig.__dataclass_fields__) | set(NeoXArgsDeepspeedRunner.__dataclass_fields__)
# A single choice leaves nothing to decide.
ONE_CHOICE = {"output_layer_parallelism"}


def sources():
    files = [path for path in map(REPOSITORY.joinpath, MAINS) if path.is_file()]
    files += (REPOSITORY / "megatron").rglob("*.py")
    return [path for path in files if not ONLY_ABOUT_ARGUMENTS.search(path.as_posix())]


@lru_cache
def mentions():
    """(attribute names and whole strings, patterns of f-strings such as f"{split}_data_paths") in the sources."""
    words, patterns = set(), set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                patterns.add(pattern_of(node))
    return words, [re.compile(pattern) for pattern in patterns if re.search("[a-z]{4}", pattern)]


@lru_cache
def names_read_from_arguments():
    found = set()
    for path in sources():
        found.update(re.findall(r"\b(?:neox_args|args|_args|settings)\.(\w+)", path.read_text(encoding="utf-8")))
    return found


def pattern_of(node):
    parts = [re.escape(part.value) if isinstance(part, ast.Constant) else "[a-z0-9]+" for part in node.values]
    return "".join(parts)


def is_read(name):
    words, patterns = mentions()
    return name in words or any(pattern.fullmatch(name) for pattern in patterns)


@pytest.mark.parametrize("name", sorted(HONOURED - HANDED_ON - ONE_CHOICE))
def test_honoured_argument_is_read(name):
    assert is_read(name), f"{name} is in HONOURED, but nothing reads it: build it, or refuse it in support.py"


def test_names_that_nothing_reads_are_found():
    assert not is_read("no_such_argument")
    assert is_read("head_dim") and is_read("train_data_paths")


# `dynamic_loss_scale` says whether it is unset.
READ_AT_DEFAULT = {"loss_scale"}


@pytest.mark.parametrize("name", sorted(set(REFUSED) - READ_AT_DEFAULT))
def test_refused_argument_is_not_read_from_the_arguments(name):
    """Code that reads a refused argument is either dead or built already; both belong in support.py."""
    assert name not in names_read_from_arguments()
