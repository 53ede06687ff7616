"""tools.head_dim wavelengths: its numbers against the definition in numpy and transformers, by kind of layer."""

import json
import math

import numpy as np
import pytest
import torch
import yaml

from tests.helpers.configs import tiny_args, tiny_values
from tests.helpers.geometries import MQA, WIDE_NON_DIVISIBLE
from tools.head_dim.__main__ import main
from tools.head_dim.subject import numbers_of
from tools.head_dim.wavelengths import base_that_turns_once

SEQ = 400
LENGTHS = dict(seq_length=SEQ, max_position_embeddings=SEQ)


def report(capsys, folder, *options, **settings):
    """Exit status and the JSON, or what was said on stderr."""
    path = folder / "model.yml"
    path.write_text(yaml.safe_dump(tiny_values(**{**LENGTHS, **settings})))
    status = main(["wavelengths", str(path), "--json", *options])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else err


def test_equals_the_definition(tmp_path, capsys):
    settings = dict(**WIDE_NON_DIVISIBLE, rotary_pct=0.5, rotary_emb_base=5000, rotary_denominator_scale=1.5)
    status, found = report(capsys, tmp_path, **settings)
    wanted = 2 * math.pi * 5000 ** (np.arange(0, 12, 2) / (1.5 * 12))
    (kind,) = found["kinds"]
    assert status == 0 and kind["layers"] == "layers 0-1"
    np.testing.assert_allclose(kind["wavelengths"], wanted, rtol=1e-6)
    assert (kind["pairs"], kind["rotated_dimensions"], kind["head_dim"], kind["reach"]) == (6, 12, 24, SEQ)
    assert kind["shortest"] == pytest.approx(2 * math.pi) and kind["longest"] == pytest.approx(wanted[-1], rel=1e-6)
    turning = int((wanted <= SEQ).sum())
    assert 0 < turning < 6
    assert (kind["turn_within_reach"], kind["never_turn"]) == (turning, 6 - turning)
    assert kind["critical_dimension"] == 2 * math.ceil(6 * math.log(SEQ / (2 * math.pi)) / math.log(kind["base"]))


def test_the_length_asked_for(tmp_path, capsys):
    _, short = report(capsys, tmp_path, **MQA)
    _, long = report(capsys, tmp_path, "--seq", "100000", **MQA)
    assert long["seq_length"] == 100000 and long["kinds"][0]["never_turn"] == 0 < short["kinds"][0]["never_turn"]


def test_kinds_of_layers_and_what_their_queries_see(tmp_path, capsys):
    _, found = report(
        capsys, tmp_path, num_layers=4, hidden_size=64, num_attention_heads=4, head_dim=[16, 16, 32, 32],
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window_width=40,
        rotary_emb_base={"sliding_attention": 1000.0, "full_attention": 50000.0}, no_rope_layers=[1, 1, 1, 0],
    )  # fmt: skip
    kinds = [(kind["layers"], kind["head_dim"], kind["pairs"], kind["reach"]) for kind in found["kinds"]]
    assert kinds == [("layer 0", 16, 8, 41), ("layer 1", 16, 8, SEQ), ("layer 2", 32, 16, 41), ("layer 3", 32, 0, SEQ)]
    for kind, base in zip(found["kinds"], (1000, 50000, 1000), strict=False):
        r = kind["rotated_dimensions"]
        wanted = 2 * math.pi * base ** (np.arange(0, r, 2) / r)
        np.testing.assert_allclose(kind["wavelengths"], wanted, rtol=1e-6)
        assert kind["turn_within_reach"] == (wanted <= kind["reach"]).sum()


def test_groups_of_heads_are_kinds(tmp_path, capsys):
    groups = {"layer": 1, "groups": [[16, 2], [64, 2]]}
    _, found = report(capsys, tmp_path, hidden_size=64, num_attention_heads=4, head_dim=[[16, 2], groups])
    kinds = [(kind["layers"], kind["head_dim"], kind["pairs"]) for kind in found["kinds"]]
    assert kinds == [("layers 0-1", 16, 8), ("layer 1", 64, 32)]


def test_scalings_are_in_it(tmp_path, capsys):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    numbers = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    numbers["original_max_position_embeddings"] = 100
    _, found = report(capsys, tmp_path, **WIDE_NON_DIVISIBLE, rope_scaling=numbers)
    config = LlamaConfig(head_dim=24, max_position_embeddings=SEQ, rope_parameters={**numbers, "rope_theta": 10000.0})
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    np.testing.assert_allclose(found["kinds"][0]["wavelengths"], 2 * math.pi / inv_freq.double().numpy(), rtol=1e-6)
    assert found["kinds"][0]["rope_scaling"]["rope_type"] == "llama3"
    assert [rule["name"] for rule in found["rules"]] == ["critical dimension", "raising the base"]


def test_pairs_that_never_move_are_null(tmp_path, capsys):
    numbers = dict(rope_type="proportional", partial_rotary_factor=0.5)
    _, found = report(capsys, tmp_path, **WIDE_NON_DIVISIBLE, rope_scaling=numbers)
    (kind,) = found["kinds"]
    assert kind["wavelengths"][6:] == [None] * 6 and None not in kind["wavelengths"][:6]
    assert kind["longest"] is None and kind["never_turn"] >= 6


@pytest.mark.parametrize("r, tokens", [(64, 4096), (128, 32768), (6, 100)])
def test_the_base_at_which_the_slowest_pair_turns_once(r, tokens):
    base = base_that_turns_once(r, tokens)
    assert 2 * math.pi * base ** ((r - 2) / r) == pytest.approx(tokens)


def test_the_suggested_scale_gives_that_base(tmp_path, capsys):
    _, found = report(capsys, tmp_path, **WIDE_NON_DIVISIBLE)
    says = next(rule["says"] for rule in found["rules"] if rule["name"] == "base for this length")
    base = base_that_turns_once(24, SEQ)
    assert f"a base of {base:,.0f} " in says
    scale = float(says.split("rotary_denominator_scale ")[1].split(" ")[0])
    assert 10000 ** (1 / scale) == pytest.approx(base, rel=0.05)


def test_verify_compares_the_base_that_acts():
    args = tiny_args(rotary_emb_base=10000, rotary_denominator_scale=2.0)
    assert numbers_of(args)["rope_theta"] == pytest.approx(100)
    assert numbers_of(args.update(rotary_denominator_scale=None))["rope_theta"] == 10000


def test_picture_page_and_refusal(tmp_path, capsys):
    path = tmp_path / "model.yml"
    path.write_text(yaml.safe_dump(tiny_values(**{**LENGTHS, **MQA})))
    assert main(["wavelengths", str(path), "--picture", str(tmp_path / "waves.png")]) == 0
    assert "Liu et al. 2024" in capsys.readouterr().out
    assert (tmp_path / "waves.png").read_bytes().startswith(b"\x89PNG")
    status, said = report(capsys, tmp_path, pos_emb="alibi")
    assert status == 2 and "pos_emb=alibi: there are no rotary pairs" in said
