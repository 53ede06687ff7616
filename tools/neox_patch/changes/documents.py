"""The page of arguments in configs/, written as its generator (configs/gen_docs.py) does, presets, and a test file."""

import re

from tools.neox_patch.change import TextChange, added
from tools.neox_patch.changes.arguments import CLASS, FIELDS, Field, doc_lines
from tools.neox_patch.source import AnchorNotFound

PATH = "configs/neox_arguments.md"


def _add_entry(field: Field):
    def edit(text: str) -> str:
        start, end = _section(text)
        if _entries(text, start, end, field.name):
            return text
        found = _entries(text, start, end, field.after)
        if len(found) != 1:
            raise AnchorNotFound(f"{PATH}: an entry **{field.after}** in the section {CLASS} ({len(found)} found)")
        place = _end_of_entry(text, found[0].end(), end)
        return text[:place] + _entry(field) + text[place:]

    return edit


def _section(text: str):
    """Where the section of NeoXArgsModel begins and ends."""
    heading = re.search(rf"^## {CLASS}[ \t]*$", text, re.MULTILINE)
    if heading is None:
        raise AnchorNotFound(f"{PATH}: the section ## {CLASS}")
    following = re.compile(r"^## ", re.MULTILINE).search(text, heading.end())
    return heading.end(), following.start() if following else len(text)


def _entries(text: str, start: int, end: int, name: str):
    return list(re.compile(rf"^- \*\*{name}\*\*", re.MULTILINE).finditer(text, start, end))


def _end_of_entry(text: str, start: int, end: int) -> int:
    """Where the next entry begins, or the section ends."""
    following = re.compile(r"^- \*\*", re.MULTILINE).search(text, start, end)
    return following.start() if following else end


def _entry(field: Field) -> str:
    annotation = field.annotation.replace('"', "'").replace("Literal", "typing.Literal")
    parts = [f"- **{field.name}**: {annotation}", "    Default = None", "\n".join(doc_lines(field)), "", ""]
    return "\n\n".join(parts)


TEXTS = [TextChange(PATH, f"{field.name} in the page of arguments", _add_entry(field)) for field in FIELDS]
FILES = [
    added("configs/qwen3/0.6B.yml", "the widths of Qwen3-0.6B: 16 heads of 128 on a hidden size of 1024"),
    added("configs/qwen3/4B.yml", "the widths of Qwen3-4B: 32 heads of 128 on a hidden size of 2560"),
    added("tests/unit/test_head_dim.py", "tests of all this, on a CPU: pytest tests/unit/test_head_dim.py"),
]
