"""python -m tools.bench.scaling_page [--results runs/bench]: the tables and pictures of docs/scaling.md.

Takes what scaling_bench, data_bench and startup_bench have written. Only what stands between the marker comments of a
part is replaced, and only for parts with new results; the text around them is written by hand.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from tools.bench.report import DEFAULT_FOLDER, Target, target_rows, text
from tools.page_section import PageSection

PATH = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
PARTS = {
    **{part: f"scaling_{part}" for part in ("length", "layers", "head_dim", "memory", "decode", "tp", "zero")},
    "data": "data",
    "startup": "startup",
}
"""Name in the page: name of the results."""
WITH_PICTURE = ("length", "layers", "head_dim", "memory", "decode", "tp", "zero")


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
    path = os.path.join(folder, f"{PARTS[part]}.json")
    if not os.path.exists(path):
        return False
    with open(path, encoding="utf-8") as file:
        section(part).write(body(part, json.load(file)))
    if part in WITH_PICTURE:
        shutil.copyfile(os.path.join(folder, f"{PARTS[part]}.png"), PATH.with_name(f"scaling_{part}.png"))
    return True


def section(part: str) -> PageSection:
    """Where a part stands in the page."""
    return PageSection(
        PATH, f"<!-- {part}: written by python -m tools.bench.scaling_page -->", f"<!-- end of {part} -->"
    )


def body(part: str, results: Dict[str, Any]) -> str:
    """A part as Markdown: table, targets if there are any, picture."""
    blocks = [table(results["rows"])]
    if results["targets"]:
        blocks.append(table(_targets(results["targets"])))
    if part in WITH_PICTURE:
        blocks.append(f"![{results['title']}](scaling_{part}.png)")
    return "\n\n".join(blocks)


def table(rows: Sequence[Dict[str, Any]]) -> str:
    """All columns that a row has, in the order in which they first come."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines: List[List[str]] = [columns, ["---"] * len(columns)]
    lines += [[text(row.get(column)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _targets(found: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    rows = target_rows([Target(each["name"], each["wanted"], each["measured"], each["most"]) for each in found])
    return [
        {"target": row["target"], "wanted": row["wanted"], "measured": row["measured"], "is": row[""]} for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
