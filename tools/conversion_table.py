"""python -m tools.conversion_table: convert every family in every geometry, both ways; write docs/conversion.md.

Only the part between the two marker comments is written. With --check nothing is: the exit code is 1 if the page has
other rows, columns or refusals than are measured. In both cases it is 1 if a difference is larger than allowed.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Tuple

from tqdm import tqdm

from megatron.convert.families import FAMILIES
from megatron.geometry import HeadGeometry
from tests.helpers import conversion_grid as grid
from tests.helpers.convert_models import TOKENS
from tests.helpers.geometries import ALL
from tools.page_section import PageSection

PATH = Path(__file__).resolve().parents[1] / "docs" / "conversion.md"
START = "<!-- the table: written by python -m tools.conversion_table -->"
END = "<!-- end of the table -->"
NUMBER = r"\d\.\de[+-]\d+"
WAYS = {"in": grid.measure_in, "out": grid.measure_out}
Key = Tuple[str, str, str]
"""Family, geometry, way."""
Results = Dict[Key, grid.Cell]


def introduction() -> str:
    """What the table says."""
    return f"""Largest difference of fp32 logits, which are of order 6, on 2 rows of {TOKENS} tokens. Before the stroke:
a model of transformers, imported. After it: a model of ours, exported, and loaded by `from_pretrained`. At most
{grid.ALLOWED:.0e} is allowed. A number in brackets is a refusal, by transformers itself where it says so; its text
stands below, with N for its numbers.

- Columns: hidden_size / query heads / key-value heads / head_dim. In the last one head_dim is absent: from Hugging Face
  that is the width its class says (128 in Qwen3, 256 in Gemma), here the quotient.
- Rows: the model types. Beside the geometry each has what its published models are known for: windows, layers without
  rotary positions, softcaps, scales, biases, tied heads, and rotary positions scaled or on part of the head.
"""


def measured(folder: Path) -> Results:
    """Every cell; half a minute on one core."""
    grid.quiet()
    results: Results = {}
    keys = [(family, geometry, way) for family in FAMILIES for geometry in ALL for way in WAYS]
    for key in tqdm(keys, desc="conversions", dynamic_ncols=True):
        family, geometry, way = key
        with tempfile.TemporaryDirectory(dir=folder) as place:
            results[key] = WAYS[way](family, geometry, Path(place))
    return results


def faults(results: Results) -> List[str]:
    """A line for each conversion that is not the same model."""
    return [
        f"{', '.join(key)}: {value:.2g} is more than {grid.ALLOWED:g}"
        for key, value in results.items()
        if not isinstance(value, str) and not value <= grid.ALLOWED
    ]


def section(results: Results) -> str:
    """The page between its markers."""
    notes: List[str] = []
    lines = [_line(["", *map(sizes, ALL)]), "|---" * (len(ALL) + 1) + "|"]
    for family in FAMILIES:
        cells = [[_text(results[family, geometry, way], notes) for way in WAYS] for geometry in ALL]
        lines.append(_line([f"`{family}`", *(" / ".join(cell) for cell in cells)]))
    refusals = [f"- [{number}] {text}" for number, text in enumerate(notes, 1)]
    return "\n".join([introduction(), *lines, "", "Refusals:", "", *refusals, ""])


def sizes(geometry: str) -> str:
    """The name of a column."""
    given = ALL[geometry]
    numbers = HeadGeometry.from_config(**given)
    width = numbers.head_dim if "head_dim" in given else "absent"
    return f"{numbers.hidden_size} / {numbers.num_attention_heads} / {numbers.num_kv_heads} / {width}"


def _text(cell: grid.Cell, notes: List[str]) -> str:
    if not isinstance(cell, str):
        return f"{cell:.1e}"
    lines = list(dict.fromkeys(re.sub(r"\b\d+(\.\d+)?\b", "N", line) for line in cell.splitlines()))
    notes += [line for line in lines if line not in notes]
    return " ".join(f"[{notes.index(line) + 1}]" for line in lines)


def _line(cells: List[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _section() -> PageSection:
    return PageSection(PATH, START, END)


def written() -> str:
    """What stands between the markers now."""
    return _section().written()


def write(new: str) -> None:
    """Put `new` between the markers."""
    _section().write(new)


def outdated(new: str) -> List[str]:
    """A line for each line of the page that is not as in `new`, differences aside."""
    old_lines, new_lines = (re.sub(NUMBER, "#", text.strip()).split("\n") for text in (written(), new))
    missing = [f"{PATH.name} lacks: {line}" for line in new_lines if line not in old_lines]
    return missing + [f"{PATH.name} should not have: {line}" for line in old_lines if line not in new_lines]


def main() -> int:
    """Measure, print, write unless --check."""
    parser = argparse.ArgumentParser(description="Convert every family in every geometry, both ways.")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page is complete")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        results = measured(Path(folder))
    new, wrong = section(results), faults(results)
    print(new)
    problems = wrong + (outdated(new) if check else [])
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    if not check and not wrong:
        write(new)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
