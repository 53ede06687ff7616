"""The page of patched checkouts is about the cases that exist, and its command sees what is missing or wrong."""

import pytest

from tests.neox_patch import checkouts, grid
from tests.neox_patch.differences import KINDS, NONE, Cell
from tools import neox_patch_table as table


def found(**cells):
    """Measurements of all states, all differences small; `cells`: {configuration's number: Cell} that are others."""
    names = list(grid.WIDTHS)
    by_name = {name: Cell(1e-6, 2e-6, 3e-5 if grid.in_transformers(grid.WIDTHS[name]) else None) for name in names}
    rows = [(kind.name, kind.allowed / 2, True) for kind in KINDS]
    everywhere = {commit: ("2024-11-27", list(rows), dict(by_name)) for commit in checkouts.STATES}
    for number, cell in cells.items():
        everywhere["96c242eb"][2][names[int(number[1:])]] = cell
    return everywhere


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page that is written by the command, without a repository."""
    path = tmp_path / "neox_patch.md"
    path.write_text(table.section(found()))
    monkeypatch.setattr(table, "PATH", path)
    monkeypatch.delenv(checkouts.VARIABLE, raising=False)
    return path


def test_the_page_of_this_project_is_complete(monkeypatch):
    monkeypatch.delenv(checkouts.VARIABLE, raising=False)
    assert table.main(["--check"]) == 0


def test_numbers_of_this_projects_page_are_small():
    lines = [line for line in table.PATH.read_text().splitlines() if line.startswith("| ")]
    cells = [cell.strip() for line in lines for cell in line.strip("|").split("|") if " / " in cell and "e-" in cell]
    assert len(cells) > len(grid.WIDTHS) * (len(checkouts.STATES) - 1)
    for text in cells:
        assert Cell(*(None if part == NONE else float(part) for part in text.split(" / "))).allowed, text


def test_a_complete_page_passes_and_an_incomplete_one_does_not(page, capsys):
    assert table.main(["--check"]) == 0
    whole = page.read_text()
    for removed in ("wide MHA", KINDS[3].name, "f5325805", "differs"):
        lines = [line for line in whole.splitlines() if removed not in line]
        page.write_text("\n".join(lines) if removed != "differs" else whole.replace("of order ten", "small"))
        assert table.main(["--check"]) == 1, removed
    assert "wide MHA" in capsys.readouterr().err


def test_nothing_is_written_without_a_repository(page):
    before = page.read_text()
    assert table.main([]) == 1
    assert page.read_text() == before


def test_measurements_decide(page, monkeypatch, tmp_path):
    """The page is written only when every difference is small; --check compares rows, columns and texts."""
    monkeypatch.setenv(checkouts.VARIABLE, str(tmp_path))
    page.write_text("")
    monkeypatch.setattr(table, "measured", lambda repo, folder: found(_3=Cell(2e-5, 1e-6, None)))
    assert table.main([]) == 1 and page.read_text() == ""
    monkeypatch.setattr(table, "measured", lambda repo, folder: found())
    assert table.main(["--check"]) == 1
    assert table.main([]) == 0 and table.main(["--check"]) == 0
    page.write_text(page.read_text().replace("1e-06", "4e-06"))
    assert table.main(["--check"]) == 0
    monkeypatch.setattr(table, "measured", lambda repo, folder: found(_2=Cell(1e-6, 1e-6, None)))
    assert table.main(["--check"]) == 1


def test_a_difference_too_large_is_a_fault():
    good, bad = Cell(1e-5, 1e-5, 1e-4), [Cell(2e-5, 0, 0), Cell(0, 2e-5, 0), Cell(0, 0, 2e-4)]
    assert good.allowed and not any(cell.allowed for cell in bad)
    wrong = found(_0=bad[0])
    wrong["f5325805"][1][0] = (KINDS[0].name, 1e-9, False)
    assert table.faults(found()) == [] and len(table.faults(wrong)) == 2
    assert Cell(0.0, 1.26e-6, None).text == f"0 / 1e-06 / {NONE}"
