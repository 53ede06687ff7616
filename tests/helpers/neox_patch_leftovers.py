"""Finds what is left in a patched checkout that takes the width of a head, or of a rank's heads, from hidden_size."""

import ast
from pathlib import Path
from typing import Dict, Iterator, List, Set

FOLDERS = ("megatron", "tools", "eval_tasks", "post-training")
HIDDEN = {"hidden_size", "hidden_dim", "hidden", "n_embd"}
DIVISORS = {
    *("num_attention_heads", "num_heads", "n_heads", "num_q_heads", "n_head", "heads"),
    *("num_kv_heads", "num_key_value_heads", "n_kv_heads"),
    *("world_size", "model_parallel_size", "tensor_parallel_size", "tp_size", "tp"),
}
ALLOWED = {
    ("megatron/geometry.py", "num_attention_heads"): "the one place",
    ("megatron/logging.py", "num_heads"): "rwkv's own heads",
}


def leftovers(root: Path) -> List[str]:
    """'path:line: code' of each quotient of hidden_size by a number of heads or ranks that is not one of ALLOWED."""
    files = [
        *sorted(root.glob("*.py")),
        *(path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))),
    ]
    return [f"{path.relative_to(root).as_posix()}:{found}" for path in files for found in _in_file(root, path)]


def _in_file(root: Path, path: Path) -> Iterator[str]:
    tree, name = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(root).as_posix()
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        for numerator, divisor in _quotient(node):
            by = aliases.get(_name(divisor), _name(divisor))
            if by in DIVISORS and _mentions_hidden(numerator, aliases) and (name, _name(divisor)) not in ALLOWED:
                yield f"{node.lineno}: {ast.unparse(node)}"


def _quotient(node: ast.AST) -> Iterator[tuple]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
        yield node.left, node.right
    elif isinstance(node, ast.Call) and _name(node.func) in ("divide", "floordiv", "divmod"):
        named = {argument.arg: argument.value for argument in node.keywords}
        given = [*node.args, *(named[key] for key in ("numerator", "denominator") if key in named)]
        if len(given) == 2:
            yield tuple(given)


def _aliases(tree: ast.AST) -> Dict[str, str]:
    """Local names that stand for a width or a number: `heads = args.num_attention_heads`."""
    known: Set[str] = HIDDEN | DIVISORS
    return {
        node.targets[0].id: _name(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _name(node.value) in known
    }


def _mentions_hidden(numerator: ast.AST, aliases: Dict[str, str]) -> bool:
    return any(aliases.get(_name(node), _name(node)) in HIDDEN for node in ast.walk(numerator))


def _name(node: ast.AST) -> str:
    """The last part of a dotted name; len(tensor_parallel_ranks) and the like have none."""
    return getattr(node, "attr", getattr(node, "id", ""))
