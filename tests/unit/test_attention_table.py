"""The table in docs/attention.md is about the grid that exists, and its command sees what is missing or wrong."""

import re

import pytest

from tests.helpers import attention_grid as grid
from tests.helpers.attention_cases import FEATURES, GEOMETRIES
from tests.helpers.te import install_te
from tests.parity.test_attention_grid import REFUSED, expected_refusal
from tools import attention_table as table

SIZES = rf"(?P<forward>{table.NUMBER})(?: / (?P<gradient>{table.NUMBER}))?"
CELL = re.compile(rf"(?:{SIZES})? ?(?P<notes>(?:\[\d+\] ?)*)")


def _tables(text):
    """([header], [rows of cells]) of each table, in order."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    starts = [number for number, line in enumerate(lines) if line[0] == table.ROW_NAMES]
    return [
        (lines[start], lines[start + 1 : end]) for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]


def _notes(text):
    return dict(re.findall(r"^- \[(\d+)\] (.*)$", text, re.MULTILINE))


def _assert_cell(cell, backend, feature, ranks, names, notes):
    what = f"{backend}, {feature}, TP {ranks}: {cell}"
    match = CELL.fullmatch(cell)
    assert match, what
    expected = [expected_refusal(backend, name, feature, ranks) for name in names]
    assert (match["forward"] is not None) == (None in expected), what
    if match["forward"]:
        found = grid.Difference(float(match["forward"]), match["gradient"] and float(match["gradient"]))
        assert grid.is_within(feature, found), what
    texts, settings = [notes[number] for number in re.findall(r"\d+", match["notes"])], set(expected) - {None}
    assert len(texts) == len(settings), what
    assert all(sum(setting in text for text in texts) == 1 for setting in settings), what


def test_the_page_has_every_row_column_and_refusal():
    text = table.written()
    assert text.startswith(table.introduction())
    notes, found = _notes(text), _tables(text)
    assert len(found) == len(grid.BACKENDS)
    for backend, (header, rows) in zip(grid.BACKENDS, found, strict=True):
        assert header == [table.ROW_NAMES, *FEATURES]
        assert [row[0] for row in rows] == [name for name, _, _ in table.rows()]
        for (_, ranks, names), (_, *cells) in zip(table.rows(), rows, strict=True):
            for feature, cell in zip(FEATURES, cells, strict=True):
                _assert_cell(cell, backend, feature, ranks, names, notes)


def test_the_refusals_on_the_page_are_those_of_today():
    texts = set(_notes(table.written()).values())
    if "te" in grid.available():
        install_te()
    for backend, feature in REFUSED:
        if backend in grid.available():
            refusal = grid.measure(backend, next(iter(GEOMETRIES)), feature)
            assert refusal in texts, f"run python -m tools.attention_table; new: {refusal}"


def _results():
    """As if measured: the expected refusals, and differences."""
    found = {}
    for ranks in grid.RANKS:
        for cell in grid.cells(ranks=ranks):
            refusal, gradient = expected_refusal(*cell, ranks), None if FEATURES[cell[2]].cache else 2e-6
            found[(ranks, *cell)] = refusal or grid.Difference(1e-6, gradient)
    return found


KEY = (4, "flash", "44 / 4 / 1 / 80 / 0.25", "window")


@pytest.mark.parametrize("worse", [grid.Difference(1e-3, 1e-6), grid.Difference(1e-6, 1e-3), grid.Difference(1e-6)])
def test_what_is_too_far_is_said(worse):
    assert table.faults(_results()) == []
    (line,) = table.faults({**_results(), KEY: worse})
    assert all(str(part) in line for part in KEY)
    (line,) = table.faults({**_results(), KEY: grid.Difference(float("nan"), 1e-6)})
    assert "nan" in line


def test_a_summary_has_the_worst_and_the_refusals():
    results = {**_results(), KEY: grid.Difference(7e-6, 3e-6), (*KEY[:3], "alibi"): "one=1\ntwo=2"}
    text = table.section(results)
    header, rows = _tables(text)[1]
    (row,) = (row for row in rows if row[0].startswith("TP 4"))
    column = header.index
    assert row[column("window")] == "7e-06 / 3e-06"
    texts = [_notes(text)[number] for number in re.findall(r"\[(\d+)\]", row[column("alibi")])]
    assert sorted(texts) == ["one=1", "pos_emb=alibi", "two=2"]


def test_the_page_is_written_between_its_markers_and_checked(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{table.START}\n{table.END}\n\nafter\n")
    monkeypatch.setattr(table, "PATH", page)
    new = table.section(_results())
    assert not table._is_complete(new)
    table.write(new)
    assert page.read_text() == f"before\n\n{table.START}\n{new.strip()}\n{table.END}\n\nafter\n"
    table.write(new)
    assert table.written() == new
    assert table._is_complete(table.section({**_results(), KEY: grid.Difference(9e-6, 1e-6)}))  # only numbers differ
    capsys.readouterr()
    assert not table._is_complete(table.section({**_results(), KEY: "sliding_window_width=3: no"}))
    assert "sliding_window_width=3: no" in capsys.readouterr().err
    assert not table._is_complete(new.replace(f"| {next(iter(GEOMETRIES))} |", "| 1 / 1 / 1 / 1 / 1 |"))
    page.write_text("no markers")
    with pytest.raises(ValueError, match="page.md"):
        table.written()
