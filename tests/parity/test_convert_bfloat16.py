"""Imported models in bfloat16: as near to the fp32 logits as transformers' own bfloat16 is.

tests/parity/test_model_families.py has the same of the families that it trains.
"""

import pytest

from megatron.convert.families import FAMILIES
from megatron.convert.hf_source import HFSource
from tests.helpers.conversion_grid import hf_config_of
from tests.helpers.convert_models import as_ours, hf_model, our_args, our_logits, save_hf, text, their_logits

GEOMETRIES = {
    "smollm3": "wide_non_divisible",
    "granite": "wide_non_divisible",
    "ministral": "narrow",
    "gemma4_text": "wide_non_divisible",
    "phi": "wide_non_divisible",
    "gpt_neox": "quotient",
}
"""Those that are not there; gpt_neox has no other widths than the quotient's."""
MOST = 1.25
"""Times their mean distance, as in the other file."""


@pytest.mark.parametrize("name", GEOMETRIES)
def test_bfloat16_is_as_accurate_as_theirs(name, tmp_path):
    config, family, tokens = hf_config_of(name, GEOMETRIES[name]), FAMILIES[name], text(rows=8)
    hf = hf_model(config)
    source = HFSource(save_hf(hf, tmp_path))
    weights = as_ours(family, our_args(family, config), {key: source.read(key) for key in source.names()})
    exact = their_logits(hf, tokens)
    ours = our_logits(our_args(family, config, precision="bfloat16"), weights, tokens)
    theirs = their_logits(hf.bfloat16(), tokens)
    mine, distance = ((logits.float() - exact).abs().mean().item() for logits in (ours, theirs))
    assert exact.abs().max() > 1 and distance > 0, "the comparison would see nothing"
    assert 0 < mine <= MOST * distance, f"{mine:.3g}, theirs {distance:.3g}"
