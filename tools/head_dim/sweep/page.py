"""python -m tools.head_dim.sweep.page [--check]: the reports of studies that ship, in docs/sweeps.md.

Each is made of its summary, docs/studies/STUDY.json, which `sweep STUDY.yml --docs` puts there. With --check nothing is
written: the exit code is 1 if the page has another report.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List

from megatron.errors import ConfigError
from tools.head_dim.sweep import pictures, report
from tools.head_dim.sweep.summary import SUMMARY
from tools.page_section import PageSection

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "sweeps.md"
FOLDER = ROOT / "docs" / "studies"
PICTURES = "studies"
"""Where the page finds the pictures."""


def section(name: str) -> PageSection:
    """Where the report of a study stands. name: its file's."""
    start = f"<!-- the report of {name}: written by python -m tools.head_dim.sweep.page -->"
    return PageSection(PAGE, start, f"<!-- end of the report of {name} -->")


def published() -> List[str]:
    """The studies with a summary in docs/studies."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def body(name: str) -> str:
    """The report as Markdown, from its summary."""
    summary = _summary(name)
    found = report.parts(summary, {what: f"{PICTURES}/{name}_{what}.png" for what in pictures.drawn(summary)})
    return report.as_markdown(found)


def publish(study: str, out: str) -> List[str]:
    """Put what a sweep has written into the docs; returns the paths.

    Raises ConfigError for a study that has no place in the page.
    """
    name = Path(study).stem
    try:
        section(name).written()
    except ValueError as error:
        raise ConfigError(f"--docs: {error}; add them for a new study") from None
    FOLDER.mkdir(exist_ok=True)
    shutil.copyfile(os.path.join(out, SUMMARY), FOLDER / f"{name}.json")
    return _write(name)


def _write(name: str) -> List[str]:
    drawn = pictures.draw(_summary(name), str(FOLDER), prefix=f"{name}_")
    section(name).write(body(name))
    return [str(PAGE), *drawn.values()]


def _summary(name: str) -> Dict[str, Any]:
    with open(FOLDER / f"{name}.json", encoding="utf-8") as file:
        return json.load(file)


def main() -> int:
    """Write the reports, or with --check say which are not those of their summaries; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a report is an older one")
    check = parser.parse_args().check
    stale = [name for name in published() if section(name).written() != body(name)]
    if check and stale:
        print(
            f"{PAGE.name}: the reports of {', '.join(stale)} are not of their summaries; run python -m {__spec__.name}"
        )
    if not check:
        for name in published():
            _write(name)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
