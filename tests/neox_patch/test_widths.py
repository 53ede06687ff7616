"""With the new arguments a patched checkout is transformers' model, this project's, and a plain one in fp64."""

import pytest
import torch

from tests.helpers.tolerances import assert_close
from tests.neox_patch import grid

OURS, THEIRS = 1e-5, 1e-4
"""Largest difference allowed: with this project, with transformers and with fp64 (logits are of order ten)."""


@pytest.fixture
def results(tried, tp):
    """{name: [result of each rank]}; all cases ran."""
    found = {name: tried.new_runs(tp)[f"width: {name}"] for name in tried.width_names(tp)}
    failed = [f"{name}: {ranks[0]['traceback']}" for name, ranks in found.items() if "error" in ranks[0]]
    assert not failed, "\n".join(failed)
    return found


def within(allowed):
    """A table for assert_close."""
    return {torch.float32: allowed, torch.float64: allowed}


def test_files_fit(results, truths, tp):
    """The model's parameters are those of the files: every name and shape (it was loaded strictly), and not one bit
    changed by loading."""
    for name, ranks in results.items():
        masters, _ = truths.weights[name]
        for rank, result in enumerate(ranks):
            expected = {f"layer_{key[0]:02d}.{key[1]}": masters.rank_share(key, rank, tp) for key in masters.weights}
            assert set(result["state"]) == set(expected), name
            assert all(torch.equal(result["state"][key], tensor) for key, tensor in expected.items()), name


def test_equals_this_project(results, truths, tp):
    for name, ranks in results.items():
        for result, our in zip(ranks, truths.ours(tp)[name], strict=True):
            assert_close(result["logits"], torch.from_numpy(our["logits"]), within(OURS), f"{name}: logits")
            assert result["loss"] == pytest.approx(our["loss"], abs=OURS), name
            assert set(result["grads"]) == set(our["grads"]), name
            for parameter, gradient in result["grads"].items():
                theirs = torch.from_numpy(our["grads"][parameter])
                assert_close(gradient, theirs, within(OURS), f"{name}: gradient of {parameter}")
            if "cached" in result:
                assert result["recomputed"] == our["cached"], name
            if "cached" in result and name in grid.CACHED_AS_RECOMPUTED:
                assert result["cached"] == our["cached"], name


def test_equals_transformers(results, truths, tp):
    assert len(truths.transformers) >= 10
    for name, expected in truths.transformers.items():
        if name not in results:
            continue
        masters, _ = truths.weights[name]
        ranks = results[name]
        for result in ranks:
            assert_close(result["logits"], expected["logits"], within(THEIRS), f"{name}: logits")
            assert result["loss"] == pytest.approx(expected["loss"], abs=THEIRS), name
            if "cached" in result:
                assert result["cached"] == expected["cached"], name
        gradients = {}
        for key in masters.weights:
            shares = [result["grads"][f"layer_{key[0]:02d}.{key[1]}"] for result in ranks]
            gradients[key] = masters.joined(key, shares)
        for parameter, gradient in masters.in_transformers(gradients).items():
            assert_close(gradient, expected["grads"][parameter], within(THEIRS), f"{name}: gradient of {parameter}")


def test_equals_a_plain_model_in_fp64(results, truths, tp):
    for name, ranks in results.items():
        masters, _ = truths.weights[name]
        if masters.has_function:
            expected = masters.logits(grid.ids()[:, :-1], tp=tp)
            for result in ranks:
                assert_close(result["logits"], expected, within(THEIRS), name)
