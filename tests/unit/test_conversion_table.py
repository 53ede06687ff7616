"""docs/conversion.md is about the families and geometries that exist, and its command sees what is missing or wrong."""

import re

import pytest
import torch

from megatron.convert.families import FAMILIES
from tests.helpers import conversion_grid as grid
from tests.helpers.geometries import ALL
from tests.helpers.tolerances import FORWARD
from tools import conversion_table as table

NOT_DIVISIBLE = {name for name, given in ALL.items() if given["hidden_size"] % given["num_attention_heads"]}
REFUSED = {
    **{
        (family, name): r"num_attention_heads=N\b|\(N\)"
        for family in ("llama", "gemma2", "gemma3_text")
        for name in NOT_DIVISIBLE
    },
    **{("mixtral", name): "num_local_experts" for name in ALL},
    **{("gpt_neox", name): r"head_dim|not divisible" for name in ALL if name != "quotient"},
}
"""By family and geometry: what a refusal names. All others are conversions."""
ONLY_IN = {("ministral", "quotient"): "transformers cannot make a ministral without head_dim"}


def _rows(text):
    """{family: {geometry: (in, out)}} of a page's table."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    assert lines[0][1:] == [table.sizes(name) for name in ALL]
    return {
        row[0].strip("`"): dict(zip(ALL, (cell.split(" / ") for cell in row[1:]), strict=True)) for row in lines[1:]
    }


def test_the_page_has_every_family_and_geometry_and_no_other_refusal():
    written = table.written()
    assert written.startswith(table.introduction())
    notes, rows = dict(re.findall(r"^- \[(\d+)\] (.*)$", written, re.MULTILINE)), _rows(written)
    assert list(rows) == list(FAMILIES)
    for family, cells in rows.items():
        for geometry, ways in cells.items():
            for way, cell in zip(table.WAYS, ways, strict=True):
                wanted = REFUSED.get((family, geometry)) or (way == "in" and ONLY_IN.get((family, geometry)))
                if wanted:
                    texts = " ".join(notes[number] for number in re.findall(r"\[(\d+)\]", cell))
                    assert re.search(wanted, texts), (family, geometry, way, texts)
                else:
                    assert float(cell) <= FORWARD[torch.float32], (family, geometry, way, cell)


@pytest.mark.parametrize("family", FAMILIES)
def test_cells_measured_now_are_those_of_the_page(family, tmp_path):
    """The wide geometry with 80 % 6 != 0 both ways: refused, in the page's words, or a conversion."""
    grid.quiet()
    notes = [line.split("] ", 1)[1] for line in table.written().splitlines() if line.startswith("- [")]
    for way, measure in table.WAYS.items():
        cell = measure(family, "wide_non_divisible", tmp_path / way)
        if isinstance(cell, str):
            assert (family, "wide_non_divisible") in REFUSED
            before = list(notes)
            table._text(cell, notes)
            assert notes == before, "the page's refusals are of another day: python -m tools.conversion_table"
        else:
            assert cell <= FORWARD[torch.float32]


def _results():
    """As if measured."""
    keys = [(family, geometry, way) for family in FAMILIES for geometry in ALL for way in table.WAYS]
    return {key: f"head_dim={n}: no" if key[:2] in REFUSED else 1e-6 for n, key in enumerate(keys)}


KEY = ("qwen3", "narrow", "out")


@pytest.mark.parametrize("worse", [1e-3, float("nan")])
def test_what_is_too_far_is_said(worse):
    assert table.faults(_results()) == []
    (line,) = table.faults({**_results(), KEY: worse})
    assert all(part in line for part in KEY)


def test_the_page_is_written_between_its_markers_and_checked(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{table.START}\n{table.END}\n\nafter\n")
    monkeypatch.setattr(table, "PATH", page)
    new = table.section(_results())
    assert table.outdated(new)
    table.write(new)
    assert page.read_text() == f"before\n\n{table.START}\n{new.strip()}\n{table.END}\n\nafter\n"
    assert table.outdated(new) == []
    assert table.outdated(table.section({**_results(), KEY: 9e-6})) == [], "only a number differs"
    refused = table.section({**_results(), KEY: "softmax_scale=0.5: no\nhead_dim=7: no"})
    assert any("softmax_scale=N: no" in line for line in table.outdated(refused))
    for what in ("lacks", "should not have"):
        assert any("`qwen3`" in line and what in line for line in table.outdated(refused))
    page.write_text("no markers")
    with pytest.raises(ValueError, match="page.md"):
        table.written()


def test_a_cell_sees_a_wrong_model(tmp_path, monkeypatch):
    """Query heads in another order, as if rows were grouped otherwise: far beyond what is allowed."""
    given = grid.load_weights_from

    def shuffled(args, model, folder):
        given(args, model, folder)
        weight = model.sequential[2].attention.query_key_value.weight
        weight.data = weight.data.flip(0)

    monkeypatch.setattr(grid, "load_weights_from", shuffled)
    for way, measure in table.WAYS.items():
        assert measure("qwen3", "narrow", tmp_path / way) > 100 * grid.ALLOWED
