"""Patched checkouts train, and exchange checkpoints with this project and with plain checkouts."""

import json
import os

import pytest
import torch

from tests.helpers.tolerances import assert_close
from tests.neox_patch import engines

LOSSES = 1e-5
LOGITS = {torch.float32: 1e-4}
"""After optimizer steps: Adam makes as much of a small gradient as of a large one."""


def done(ranks):
    """The results of a case, none of which failed."""
    assert "error" not in ranks[0], ranks[0]["traceback"]
    return ranks


def test_training_without_new_arguments_is_as_before(tried, tp):
    for name in engines.PLAIN:
        before, after = (done(runs(tp)[f"trains: {name}"]) for runs in (tried.plain_runs, tried.new_runs))
        for old, new in zip(before, after, strict=True):
            assert old["losses"] == new["losses"] and old["losses"][1] < old["losses"][0]
            assert torch.equal(old["logits"], new["logits"]), name


def test_a_plain_checkout_resumes_what_a_patched_one_saved(tried, tp):
    """Without new arguments; the record beside the checkpoint does not disturb it."""
    for name in engines.PLAIN:
        saved = done(tried.new_runs(tp)[f"trains: {name}"])
        for old, new in zip(done(tried.plain_runs(tp)[f"loads: {name}"]), saved, strict=True):
            assert old["iteration"] == engines.STEPS
            assert torch.equal(old["logits"], new["logits"]), name
            assert old["losses"][-1] < new["losses"][-1]


def test_training_equals_this_project(tried, truths, tp):
    for name in engines.NAMES:
        for new, our in zip(done(tried.new_runs(tp)[f"trains: {name}"]), truths.our_training(tp), strict=True):
            assert new["losses"] == pytest.approx(our[name]["losses"], abs=LOSSES), name
            assert_close(new["logits"], torch.from_numpy(our[name]["logits"]), LOGITS, name)
            assert new["losses"][1] < new["losses"][0]


def test_sequence_parallel_is_the_same_training(tried, truths):
    """The norms over heads, which see whole sequences of some heads, among the others, which see pieces of all."""
    for name in ("non-divisible GQA", "per_head, GQA"):
        for new, our in zip(done(tried.new_runs(2)[f"sequence parallel: {name}"]), truths.our_training(2), strict=True):
            assert new["losses"] == pytest.approx(our[name]["losses"], abs=LOSSES), name


def test_resumes_what_this_project_saved(tried, truths, tp):
    for name in engines.NAMES:
        for new, our in zip(done(tried.new_runs(tp)[f"resumes: {name}"]), truths.our_training(tp), strict=True):
            assert new["iteration"] == engines.STEPS
            assert_close(new["logits"], torch.from_numpy(our[name]["logits"]), {torch.float32: 1e-5}, name)
            assert new["losses"] == pytest.approx(our[name]["losses after"], abs=LOSSES), name


def test_another_geometry_is_refused(tried, tp):
    """The tensors would fit: only the record tells."""
    for name in engines.NAMES[:2]:
        for result in tried.new_runs(tp)[f"refuses: {name}"]:
            assert result.get("error") == "CheckpointError", result
            assert "head_dim: 24 in the checkpoint, 12 in the config" in result["message"]
            assert "num_attention_heads: 6 in the checkpoint, 12 in the config" in result["message"]


def test_this_project_loads_what_was_saved(tried, tp):
    trained = {name: done(tried.new_runs(tp)[f"trains: {name}"]) for name in engines.NAMES}
    for rank, read in enumerate(tried.our_reading(tp)):
        for name, (logits, refusal) in read.items():
            assert_close(torch.from_numpy(logits), trained[name][rank]["logits"], {torch.float32: 1e-5}, name)
            assert refusal and "head_dim: 24 in the checkpoint, 12 in the config" in refusal, name


def test_the_record_is_this_projects(tried, truths, tp):
    """The same numbers, under the same names."""
    for name in engines.NAMES:
        done(tried.new_runs(tp)[f"trains: {name}"])
        records = []
        for folder in (os.path.join(tried.saves(tp), name), truths.our_training(tp)[0][name]["folder"]):
            with open(os.path.join(folder, f"global_step{engines.STEPS}", "head_geometry.json")) as file:
                records.append(json.load(file))
        theirs, our = records
        assert theirs["version"] == our["version"] and len(theirs["layers"]) == len(our["layers"]) == 2
        for one, other in zip(theirs["layers"], our["layers"], strict=True):
            assert one.pop("softmax_scale") == pytest.approx(other.pop("softmax_scale"), rel=1e-12)
            assert one == other
