"""python -m tools.bench.performance_page [--results runs/bench]: the tables and pictures of docs/performance.md.

Takes what `make bench` has written. Only what stands between the marker comments of a part is replaced, and only for
parts with new results; the text around them is written by hand.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from tools.bench.report import DEFAULT_FOLDER
from tools.bench.scaling_page import table
from tools.page_section import PageSection

PATH = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
PARTS = ("summary", "train_bfloat16", "train_fp32", "memory", "memory_estimate", "loss", "attention", "decode")
"""Names of the results."""
WITH_PICTURE = ("train_bfloat16", "train_fp32", "memory", "attention", "decode")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Write the parts that have results; returns 1 if none has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=DEFAULT_FOLDER, help="folder of the results; default: %(default)s")
    folder = parser.parse_args(arguments).results
    written = [part for part in PARTS if write(part, folder)]
    print(f"{PATH.name}: {', '.join(written) or 'nothing to write'}")
    return 0 if written else 1


def write(part: str, folder: str) -> bool:
    """Replace one part of the page, and its picture; False if there are no results of it."""
    path = os.path.join(folder, f"{part}.json")
    if not os.path.exists(path):
        return False
    with open(path, encoding="utf-8") as file:
        section(part).write(body(part, json.load(file)))
    if part in WITH_PICTURE:
        shutil.copyfile(os.path.join(folder, f"{part}.png"), PATH.with_name(f"performance_{part}.png"))
    return True


def section(part: str) -> PageSection:
    """Where a part stands in the page."""
    return PageSection(
        PATH, f"<!-- {part}: written by python -m tools.bench.performance_page -->", f"<!-- end of {part} -->"
    )


def body(part: str, results: Dict[str, Any]) -> str:
    """A part as Markdown: what it ran on, table, picture."""
    machine = results["machine"]
    blocks = [f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}.", table(results["rows"])]
    if part in WITH_PICTURE:
        blocks.append(f"![{results['title']}](performance_{part}.png)")
    return "\n\n".join(blocks)


if __name__ == "__main__":
    sys.exit(main())
