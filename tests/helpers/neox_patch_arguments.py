"""Small modules with the constructs of GPT-NeoX's argument files that the patch changes, in several spellings."""

import ast
import dataclasses
import importlib.util
import sys
import types
from types import ModuleType
from typing import Any, Dict, Iterator

import pytest

from tools.neox_patch.change import FILES

FIELDS = '''
import dataclasses
from typing import Literal

@dataclasses.dataclass
class NeoXArgsOther:
    """Other Arguments"""

    use_mup: bool = False
    """
    Widths that can be scaled.
    """

@dataclasses.dataclass
class NeoXArgsModel:
    """
    Model Arguments
    """

    hidden_size: int = None
    """
    How wide it is.
    """

    num_attention_heads: int = None
    """How many heads look."""

    num_kv_heads: int = None
    """
    How many heads are looked at.

    None: as many.
    """

    seq_length: int = 32
    """
    How far they look.
    """

    use_qk_layernorm: bool = False
    """
    Norms.
    """

    attention_config: list = None
    """
    Kinds.
    """
'''

FIELDS_OTHERWISE = '''
from typing import *
from dataclasses import dataclass

class Unrelated: pass

@dataclass
class NeoXArgsModel:
    """Model Arguments"""
    use_qk_layernorm: bool = False # no text below
    attention_config: list = None
    num_attention_heads: int = None
    hidden_size: int = None
    softmax_kind: str = "exact"
    """not ours"""
    # keys and values
    num_kv_heads: int = None
    r"""One line."""  # said here
    use_mup: bool = False
    seq_length: int = 32
'''

CHECKS = """
import logging
from megatron.logging import Tee
from .fields import NeoXArgsModel

class NeoXArgs(NeoXArgsModel):
    def __post_init__(self):
        self.log = ["start"]
        self.calculate_derived()
        if not self.validate_types():
            raise ValueError("types")
        if not self.validate_values():
            raise ValueError("values")

    def calculate_derived(self):
        self.log.append("derived")

    def validate_types(self):
        self.log.append("types")
        return type(self.num_attention_heads) is int

    def validate_values(self):
        # of widths
        if self.hidden_size % self.num_attention_heads != 0 and not (
            "mamba" in self.attention_config
        ):
            message = (
                "wrong: "
                + "hidden_size must divide by num_attention_heads"
            )
            logging.error(message)
            raise ValueError(message)
        return True
"""

CHECKS_OTHERWISE = """
import os
from megatron.logging import Tee
import logging
from .fields import NeoXArgsModel

class NeoXArgs( NeoXArgsModel ):
    def validate_values(me):
        if "mamba" not in me.attention_config and me.hidden_size%me.num_attention_heads or me.seq_length == 13: # odd
            raise ValueError(f'{me.num_attention_heads} heads, hidden_size')
        return True
    def __post_init__(me):
        me.log = []
        me.calculate_derived()   # what follows from the rest
        me.log.append("own line")
        assert me.validate_types() and me.validate_values()
    def calculate_derived(me): me.log.append("derived")
    def validate_types(me): me.log.append("types"); return type(me.num_attention_heads) is int
"""

CHECKS_NEGATED = (
    CHECKS.replace("if self.hidden_size %", "if not self.hidden_size %")
    .replace("!= 0 and not", "== 0 and not")
    .replace("and not (", "and len(self.attention_config) > 0 and not (")
)
CHECKS_SHORT = CHECKS.replace(
    """!= 0 and not (
            "mamba" in self.attention_config
        ):""",
    ":",
)
SPELLINGS = {
    "as GPT-NeoX": (FIELDS, CHECKS),
    "otherwise": (FIELDS_OTHERWISE, CHECKS_OTHERWISE),
    "negated": (FIELDS, CHECKS_NEGATED),
    "short": (FIELDS_OTHERWISE, CHECKS_SHORT),
}


def load_arguments(fields: str, checks: str, check_head_dim) -> type:
    """The class NeoXArgs of two texts, constructed by keywords; `check_head_dim` is what the patch's import gives."""
    first: Dict[str, Any] = {"__name__": "fields"}
    exec(fields, first)
    lines = [line for line in checks.split("\n") if not line.startswith("from ")]
    second = {"NeoXArgsModel": first["NeoXArgsModel"], "check_head_dim": check_head_dim, "__name__": "checks"}
    exec("\n".join(lines), second)
    return dataclasses.dataclass(second["NeoXArgs"])


def page_of(fields: str) -> str:
    """The page of a text of fields as GPT-NeoX's generator lays it out: parts with an empty line between them."""
    parts = ["About.\n"]
    classes = [node for node in ast.parse(fields).body if isinstance(node, ast.ClassDef) and node.name != "Unrelated"]
    for node in classes:
        parts += [f"## {node.name}", ast.get_docstring(node), ""]
        for line, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign):
                parts += [*_entry(line, following), ""]
    return "\n\n".join(parts)


def _entry(line: ast.AnnAssign, following) -> Iterator[str]:
    annotation = ast.unparse(line.annotation)
    yield f"- **{ast.unparse(line.target)}**: {annotation.replace('Literal', 'typing.Literal')}"
    yield f"    Default = {ast.literal_eval(line.value)}"
    yield "    " + (following.value.value.strip() if isinstance(following, ast.Expr) else "")


def load_placed(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A module that is placed in the checkout as megatron.head_dim.NAME, beside this project's geometry and errors."""
    package = types.ModuleType("megatron.head_dim")
    package.__path__ = [str(FILES / "megatron/head_dim")]
    monkeypatch.setitem(sys.modules, "megatron.head_dim", package)
    for other in ("config", "te_attention", name):
        monkeypatch.delitem(sys.modules, f"megatron.head_dim.{other}", raising=False)
    spec = importlib.util.find_spec(f"megatron.head_dim.{name}")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
