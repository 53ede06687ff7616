"""python -m tools.attention_table: compare every kind of attention with one reference; write docs/attention.md.

Only the part between the two marker comments is written. With --check nothing is: the exit code is 1 if the page has
other rows, columns or refusals than are measured. In both cases it is 1 if a difference is larger than allowed.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterable, List, Tuple

from tests.helpers import attention_grid as grid
from tests.helpers.attention_cases import FEATURES, GEOMETRIES, LONG, geometries
from tests.helpers.distributed import run_distributed
from tests.helpers.te import VERSION, WHEEL
from tools.page_section import PageSection

PATH = Path(__file__).resolve().parents[1] / "docs" / "attention.md"
START = "<!-- the attention table: written by python -m tools.attention_table -->"
END = "<!-- end of the attention table -->"
ROW_NAMES = "hidden / n / m / d / rotary_pct"
NUMBER = r"\d(?:\.\d+)?e[+-]\d+"
TITLES = {
    "global": "attention_config `global`",
    "flash": "attention_config `flash`",
    "chunked": "attention_config `chunked`",
    "te": "`te_mha`: Transformer Engine",
}
Key = Tuple[int, str, str, str]
"""Tensor-parallel ranks, backend, geometry, feature."""
Results = Dict[Key, grid.Result]


def introduction() -> str:
    """What the tables say."""
    fp32, bf16 = (" / ".join(f"{limit:.0e}" for limit in grid.allowed(name)) for name in ("causal", "bf16"))
    prompt, piece, *_ = grid.PIECES
    return f"""## Every kind of attention, compared

One attention layer, from the QKV projection to the output projection, against one reference: an einsum in fp64 that
shares no code with it. A cell has the largest absolute difference of the output / of the gradients of the input and of
every parameter; outputs are of order one. A number in brackets is a refusal, whose text stands below. Allowed are
{fp32}, with bf16 {bf16}. On the CPU; {grid.BATCH} rows of {sum(grid.PIECES)} tokens.

- Rows: hidden_size / query heads / key-value heads / head_dim / rotary_pct. Below them the largest difference over all
  geometries, and over those that split over 2 and 4 tensor-parallel ranks; with fewer key-value heads than ranks these
  are shared.
- cache: a prompt of {prompt} tokens, {piece} more at once, the rest one by one; no gradients. The 8-bit caches are
  compared with the reference over keys and values rounded as their format says.
- `chunked` is measured as it is and in blocks of {grid.BLOCK} tokens; {LONG} tokens are one row, longer than its block.
- `te_mha` runs the Python of Transformer Engine {VERSION} with stand-ins for what NVIDIA ships compiled.
- bf16 is precision: bfloat16; all else is fp32. joint, per_head and full_width are `qk_norm_type`; sequence parallel
  differs from causal only with more than one rank.
"""


def measured(folder: str) -> Results:
    """Every cell at every number of ranks, with a progress bar for each number; two minutes on two cores."""
    results: Results = {}
    for ranks in grid.RANKS:
        cells = list(grid.cells(ranks=ranks))
        arguments = (cells, f"TP {ranks}")
        by_rank = run_distributed(ranks, grid.measure_cells, *arguments, tmp_path=folder, timeout=600)
        for cell, shares in zip(cells, zip(*by_rank, strict=True), strict=True):
            results[(ranks, *cell)] = _joined(shares)
    return results


def _joined(shares: Tuple[grid.Result, ...]) -> grid.Result:
    """The ranks' results of a cell as one: they refuse together."""
    if isinstance(shares[0], str):
        if set(shares) != {shares[0]}:
            raise RuntimeError(f"the ranks disagree about a refusal: {shares}")
        return shares[0]
    return grid.largest(shares)


def faults(results: Results) -> List[str]:
    """A line for each cell that is computed and too far from the reference."""
    return [
        f"TP {key[0]}, {', '.join(key[1:])}: {result} is more than {grid.allowed(key[3])}"
        for key, result in results.items()
        if not isinstance(result, str) and not grid.is_within(key[3], result)
    ]


class _Notes:
    """Refusals by number, in order of appearance."""

    def __init__(self):
        self.texts: List[str] = []

    def references(self, refusals: Iterable[str]) -> str:
        """`[1] [2]` for these refusals; each line of one is a note of its own."""
        lines = dict.fromkeys(line for refusal in refusals for line in refusal.splitlines())
        self.texts += [line for line in lines if line not in self.texts]
        return " ".join(f"[{self.texts.index(line) + 1}]" for line in lines)


def section(results: Results) -> str:
    """The page between its markers."""
    notes, parts = _Notes(), [introduction()]
    for backend in grid.BACKENDS:
        parts.append("\n".join([f"### {TITLES[backend]}", "", *_table(backend, results, notes), ""]))
    parts.append("\n".join(["### Refusals", "", *(f"- [{i}] {text}" for i, text in enumerate(notes.texts, 1)), ""]))
    return "\n".join(parts)


def _table(backend: str, results: Results, notes: _Notes) -> List[str]:
    lines = [_line([ROW_NAMES, *FEATURES]), "|---" * (len(FEATURES) + 1) + "|"]
    for name, ranks, names in rows():
        cells = [[results[ranks, backend, geometry, feature] for geometry in names] for feature in FEATURES]
        lines.append(_line([name, *(_text(cell, notes) for cell in cells)]))
    return lines


def rows() -> List[Tuple[str, int, List[str]]]:
    """(name, tensor-parallel ranks, geometries) of each row of a table."""
    one_by_one = [(name, 1, [name]) for name in GEOMETRIES]
    split = {ranks: list(geometries(ranks)) for ranks in grid.RANKS}
    return one_by_one + [(f"TP {ranks}, {len(names)} geometries", ranks, names) for ranks, names in split.items()]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(results: List[grid.Result], notes: _Notes) -> str:
    """The worst difference, and the refusals."""
    found = [result for result in results if not isinstance(result, str)]
    parts = []
    if found:
        worst = grid.largest(found)
        parts.append(" / ".join(f"{value:.0e}" for value in worst if value is not None))
    refusals = notes.references(result for result in results if isinstance(result, str))
    return " ".join([*parts, refusals] if refusals else parts)


def _section() -> PageSection:
    return PageSection(PATH, START, END)


def written() -> str:
    """What stands between the markers now."""
    return _section().written()


def write(new: str) -> None:
    """Put `new` between the markers."""
    _section().write(new)


def without_numbers(text: str) -> List[str]:
    """The lines of a section with every difference as #."""
    return re.sub(NUMBER, "#", text).split("\n")


def _is_complete(new: str) -> bool:
    """Whether the page is `new` but for the differences; says where it is not."""
    old_lines, new_lines = without_numbers(written()), without_numbers(new)
    apart = [pair for pair in zip(old_lines, new_lines, strict=False) if pair[0] != pair[1]]
    for old, fresh in apart:
        print(f"error: {PATH.name} has\n  {old}\nand measured is\n  {fresh}", file=sys.stderr)
    if len(old_lines) != len(new_lines):
        print(f"error: {PATH.name} has {len(old_lines)} lines, measured are {len(new_lines)}", file=sys.stderr)
    return not apart and len(old_lines) == len(new_lines)


def main() -> int:
    """Measure, print, write unless --check."""
    parser = argparse.ArgumentParser(description="Compare every kind of attention with one fp64 reference.")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page is complete")
    check = parser.parse_args().check
    if "te" not in grid.available():
        print(f"error: Transformer Engine {VERSION} is not in {WHEEL}; `make setup` puts it there", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        results = measured(folder)
    new, wrong = section(results), faults(results)
    print(new)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if check:
        return 0 if _is_complete(new) and not wrong else 1
    if not wrong:
        write(new)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
