"""What needs no model: operation counts of real checkouts, and head widths that are not the geometry's."""

import pytest

from tests.helpers.geometries import NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.neox_patch_arguments import load_placed
from tests.helpers.neox_patch_geometry import counted_arguments, counting_functions
from tests.helpers.neox_patch_leftovers import leftovers
from tools.neox_patch.changes.flops import PATH

QUOTIENT = dict(hidden_size=64, num_attention_heads=4)
UNCHANGED = [QUOTIENT, dict(QUOTIENT, head_dim=16), dict(QUOTIENT, num_kv_heads=2), dict(QUOTIENT, expansion_factor=3)]


@pytest.mark.parametrize("recomputed", [False, True])
def test_operation_counts(plain, new, recomputed, monkeypatch):
    """To the last bit as before wherever queries are as wide as hidden_size, and for layers without heads."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    placed = load_placed(monkeypatch, "flops")
    before, after = (counting_functions((folder / PATH).read_text(), placed) for folder in (plain, new))
    assert len(before) == len(after) >= 1
    for number, (old, now) in enumerate(zip(before, after, strict=True)):
        for widths in UNCHANGED:
            args = counted_arguments(checkpoint_activations=recomputed, **widths)
            assert now(args, 0.7) == old(args, 0.7)
        for kind in ("rwkv", "mamba"):
            args = counted_arguments((kind,) * 3, recomputed, hidden_size=50, num_attention_heads=4)
            assert now(args, 0.7) == old(args, 0.7)
        for widths in (WIDE_NON_DIVISIBLE, NARROW):
            args = counted_arguments(checkpoint_activations=recomputed, **widths)
            assert now(args, 0.7) == placed.head_dim_flops(args, recomputed and number == 0) / (0.7 * 2)


def test_no_head_width_is_left(plain, new):
    """There are some before, so what finds them does."""
    assert len(leftovers(plain)) > 4
    assert leftovers(new) == []
