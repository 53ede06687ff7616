"""Edits that several changes make: a keyword argument added to a call, an import, a dataclass field."""

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.source import AnchorNotFound, Source, same_code


def set_keyword(source: Source, call: cst.Call, name: str, value: str) -> None:
    """Give a call the keyword argument `name`: its value is replaced, or it is added behind the last argument.

    Raises AnchorNotFound for a call without arguments, which no construct of GPT-NeoX that is changed is.
    """
    present = find.keyword(call, name)
    if present is not None:
        source.replace(present.value, value)
        return
    if not call.args:
        raise AnchorNotFound(f"{source.path}: arguments of {source.code(call)}")
    last = call.args[-1]
    brackets = getattr(last.value, "rpar", ())  # not part of the span of what is in them
    _, end = source.span(brackets[-1] if brackets else last.value)
    start, _ = source.span(last)
    if not source.begins_line(last):
        source.insert_text(end, f", {name}={value}")
    elif source.line_after(end).lstrip().startswith(","):  # a comment behind the comma stays with its argument
        source.insert_text(end + len(source.line_after(end).encode()), f"\n{source.line_before(start)}{name}={value},")
    else:
        source.insert_text(end, f",\n{source.line_before(start)}{name}={value}")


def add_import(source: Source, statement: str) -> None:
    """Add an import at the top of the file, behind the last of `megatron` (or the last of all) before any definition.

    Raises AnchorNotFound if the file imports nothing.
    """
    imports = [line for line in source.module.body if _is_import(line)]
    if any(same_code(source.code(line).strip(), statement) for line in imports):
        return
    definitions = [line for line in source.module.body if isinstance(line, (cst.ClassDef, cst.FunctionDef))]
    if definitions:
        top = source.span(definitions[0])[0]
        imports = [line for line in imports if source.span(line)[0] < top]
    ours = [line for line in imports if source.code(line).startswith(("from megatron", "import megatron"))]
    if not imports:
        raise AnchorNotFound(f"{source.path}: an import at the top of the file")
    source.insert_after((ours or imports)[-1], statement)


def _is_import(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], (cst.Import, cst.ImportFrom))
