"""One place decides a width: no other file divides by a number of heads."""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HEADS = ("num_attention_heads", "num_kv_heads", "num_key_value_heads")


def _divisions(tree):
    """Each division whose divisor ends in a number of heads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Div)):
            divisor = node.right
            name = getattr(divisor, "attr", getattr(divisor, "id", None))
            if name in HEADS:
                yield node


def test_only_the_geometry_divides_by_a_number_of_heads():
    files = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "megatron").rglob("*.py"), *(REPOSITORY / "tools").rglob("*.py")]
    found = {path.relative_to(REPOSITORY).as_posix() for path in files if any(_divisions(ast.parse(path.read_text())))}
    assert found == {"megatron/geometry.py"}
