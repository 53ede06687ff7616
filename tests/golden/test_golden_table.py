"""docs/golden.md is about the golden cases that exist, and holds no difference larger than is allowed."""

from tests.golden import cases
from tools import golden_table


def test_the_page_has_the_lines_that_are_measured():
    text = golden_table.PATH.read_text()
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    planned = golden_table.planned()
    assert [tuple(line[:3]) for line in lines[1:]] == [row.key for row in planned]
    for row, (*_, difference, allowed) in zip(planned, lines[1:], strict=True):
        assert float(allowed) == row.allowed and float(difference) <= row.allowed
    assert text.startswith(golden_table.INTRODUCTION)


def test_every_case_with_data_has_lines():
    with_data = {(folder.parent.name, folder.name[:3]) for folder in cases.DATA.glob("case*/tp*_pp*")}
    planned = {
        (row.case, row.layout[:4].replace("TP ", "tp")) for row in golden_table.planned() if row.quantity == "loss"
    }
    assert planned == with_data
