"""neox_args_head_dim.md: its tables are today's, the errors it quotes exist, its commands and links work."""

import re
import shlex
from pathlib import Path

import pytest

from tools import head_dim_tables
from tools.head_dim.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "neox_args_head_dim.md").read_text()


@pytest.mark.parametrize("name", head_dim_tables.TABLES)
def test_the_tables_are_of_today(name):
    assert head_dim_tables.section(name).written() == head_dim_tables.TABLES[name]()


def _quoted_errors():
    rows = PAGE[PAGE.index("## Troubleshooting") : PAGE.index("## Questions")].splitlines()
    return [
        match.group(1) for row in rows if (match := re.match(r"\| `(.+?)`", row)) and "another framework" not in row
    ]


def _text_of_sources():
    """All string literals, as they run on over lines, without quotes and line breaks."""
    sources = "\n".join(path.read_text() for path in (ROOT / "megatron").rglob("*.py"))
    return re.sub(r"\{[^{}]*\}", "...", re.sub(r'"\s*\n\s*f?"', "", sources))


@pytest.mark.parametrize("quoted", _quoted_errors())
def test_quoted_errors_are_in_the_source(quoted):
    text = _text_of_sources()
    for part in quoted.split("..."):
        assert part.strip(" =") in text, part


def test_enough_errors_are_quoted():
    assert len(_quoted_errors()) >= 6


def test_links_lead_somewhere():
    titles = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = target.partition("#")
        assert not path or (ROOT / path).exists(), target
        assert path or anchor in anchors, target


def test_commands_are_ones_that_exist():
    lines = [line.strip() for line in PAGE.splitlines() if line.startswith("    python")]
    assert len(lines) >= 7
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[1] == "-m":
            assert (ROOT / (words[2].replace(".", "/"))).exists() or (
                ROOT / (words[2].replace(".", "/") + ".py")
            ).exists()
            assert words[2] != "tools.head_dim" or words[3] in COMMANDS
        else:
            assert (ROOT / words[1]).exists(), line
