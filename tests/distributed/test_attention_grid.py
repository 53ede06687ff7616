"""Heads split over 2 and 4 ranks: output and gradients of each rank's share are the fp64 reference's.

The reference knows nothing of ranks. tests/parity/test_attention_grid.py says what is refused.
"""

import pytest

from tests.helpers import attention_grid as grid
from tests.helpers.attention_cases import GEOMETRIES, LONG
from tests.helpers.distributed import run_distributed
from tests.parity.test_attention_grid import assert_as_expected

TESTED = {
    2: ("88 / 12 / 4 / 10 / 1", "80 / 6 / 2 / 24 / 0.25", "44 / 4 / 1 / 80 / 0.25"),
    4: ("88 / 12 / 4 / 10 / 1", "160 / 4 / 2 / 24 / 0.5", "72 / 4 / 4 / 64 / 0.25", "44 / 4 / 1 / 80 / 0.25"),
}
"""By ranks: GQA, wide and non-divisible, MHA, and fewer key/value heads than ranks: 1 of 2, 2 of 4 and 1 of 4. The
table in docs/attention.md has all that split."""


def test_the_names_are_of_geometries_that_split():
    for ranks, names in TESTED.items():
        assert set(names) <= set(grid.geometries(ranks))
    shared = [GEOMETRIES[name].get("num_kv_heads", 99) for name in TESTED[4]]
    assert {1, 2} <= set(shared)


def cells_of(ranks):
    """Those of these geometries, without the feature that is about one rank's blocks.

    Transformer Engine over 4 ranks is in the table only: its import in each takes as long as all the rest.
    """
    backends = [name for name in grid.available() if name != "te" or ranks < 4]
    every = grid.cells(backends, ranks)
    return [cell for cell in every if cell[1] in TESTED[ranks] and cell[2] != f"{LONG} tokens"]


@pytest.mark.parametrize("ranks", TESTED)
def test_every_rank_has_its_share_of_the_reference(ranks, tmp_path):
    cells = cells_of(ranks)
    for results in run_distributed(ranks, grid.measure_cells, cells, tmp_path=tmp_path, timeout=200):
        for cell, result in zip(cells, results, strict=True):
            assert_as_expected(cell, result, ranks)
