"""Every backend with every geometry and feature is the fp64 reference, or refuses by name; nothing else is refused.

The page that shows it is docs/attention.md, written by tools/attention_table.py from the same grid.
"""

import contextlib
from unittest import mock

import pytest

from megatron.model.attention.core import chunked, cpu_flash
from tests.helpers import attention_grid as grid
from tests.helpers.attention_cases import FEATURES, GEOMETRIES
from tests.helpers.te import install_te

NO_BIAS = {"alibi": "pos_emb=alibi", "cache, alibi, window": "pos_emb=alibi", "rpe": "pos_emb=rpe"}
"""feature: the setting that adds to the scores."""
BY_BACKEND = {
    "flash": {**NO_BIAS, "softcap": "attn_logit_softcap=0.7"},  # torch's kernel, which is the one on a CPU
    "chunked": NO_BIAS,
    "te": {
        **NO_BIAS,
        "softcap": "attn_logit_softcap=0.7",  # of Transformer Engine 1.12; 2.x has it
        "joint norm": "use_qk_layernorm=True",
        "cache, joint norm": "use_qk_layernorm=True",
        "per_head norm": "qk_norm_type=per_head",
        "full_width norm": "qk_norm_type=full_width",
        "fp8 cache": "kv_cache_dtype=fp8_e4m3",
        "int8 cache, window": "kv_cache_dtype=int8",
    },
}
REFUSED = {(backend, feature): setting for backend, rules in BY_BACKEND.items() for feature, setting in rules.items()}
"""(backend, feature) that cannot be had with any geometry, and the setting that the refusal must name."""


def expected_refusal(backend, geometry, feature, ranks=1):
    """The setting that is to be named, or None if the cell is to be computed."""
    numbers = GEOMETRIES[geometry]
    kv_heads = numbers.get("num_kv_heads", numbers["num_attention_heads"])
    if backend == "te" and kv_heads % ranks:  # Transformer Engine shares no key/value head between ranks
        return f"num_kv_heads={kv_heads}"
    return REFUSED.get((backend, feature))


def assert_as_expected(cell, result, ranks=1):
    """A difference within tolerance where one is to be computed; a refusal that names its setting where not."""
    setting = expected_refusal(*cell, ranks)
    if setting is None:
        assert isinstance(result, grid.Difference), f"TP {ranks}, {cell} is refused: {result}"
        limit = grid.allowed(cell[2])
        assert grid.is_within(cell[2], result), f"TP {ranks}, {cell} differs by {result}, allowed is {limit}"
    else:
        assert isinstance(result, str), f"TP {ranks}, {cell} is computed; it was to be refused for {setting}"
        assert setting in result, f"TP {ranks}, {cell}: the refusal does not name {setting}: {result}"


@pytest.fixture(scope="module", autouse=True)
def transformer_engine():
    if "te" in grid.available():
        install_te()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_cell_is_the_reference_or_refused(geometry):
    for cell in grid.cells(grid.available()):
        if cell[1] == geometry:
            assert_as_expected(cell, grid.measure(*cell))


def test_the_chunked_kernel_is_measured_on_each_of_its_ways():
    """With its short cuts, no text of the grid would come to its own loops, and few to torch's kernel."""
    least = {(chunked, "_forward"): 3, (chunked, "_backward"): 3, (cpu_flash, "forward"): 2, (cpu_flash, "backward"): 1}
    with contextlib.ExitStack() as stack:
        spies = {}
        for module, name in least:
            spy = mock.patch.object(module, name, wraps=getattr(module, name))
            spies[module, name] = stack.enter_context(spy)
        for feature in ("causal", "window", "softcap"):
            grid.measure("chunked", next(iter(GEOMETRIES)), feature)
    for (module, name), count in least.items():
        assert spies[module, name].call_count >= count, f"{module.__name__}.{name}"


def test_the_grid_is_wide_enough():
    """Wide, narrow, quotient and non-divisible; MHA, GQA, MQA; every head_dim and rotated part that is asked of it."""
    every = list(GEOMETRIES.values())
    assert {numbers["head_dim"] for numbers in every} >= {8, 10, 12, 24, 64, 80, 128, 256, 320}
    assert {numbers["rotary_pct"] for numbers in every} == {0.25, 0.5, 1.0}
    widths = [(x["hidden_size"], x["num_attention_heads"] * x["head_dim"]) for x in every]
    assert {(query > hidden) - (query < hidden) for hidden, query in widths} == {-1, 0, 1}
    assert sum(x["hidden_size"] % x["num_attention_heads"] != 0 for x in every) >= 3
    kinds = [x.get("num_kv_heads", x["num_attention_heads"]) for x in every]
    for ranks in grid.RANKS:
        present = {m for m, name in zip(kinds, GEOMETRIES, strict=True) if name in set(grid.geometries(ranks))}
        assert 1 in present and 2 in present, f"TP {ranks}"
    assert set(feature for _, feature in REFUSED) <= FEATURES.keys()
