"""Without the new arguments a patched checkout is the plain one: names, shapes, weights, numbers, to the last bit."""

import torch

from tests.neox_patch import grid


def test_everything_is_as_before(tried, tp):
    names = [f"absent: {name}" for name in grid.runs(grid.ABSENT, tp)]
    before, after = tried.plain_runs(tp), tried.new_runs(tp)
    for name in names:
        for old, new in zip(before[name], after[name], strict=True):
            assert "error" not in old, f"{name}, as it is: {old['traceback']}"
            assert "error" not in new, f"{name}, patched: {new['traceback']}"
            assert_same(old, new, name)


def assert_same(old, new, name):
    """Names and shapes; initial weights; logits, loss, gradients; generated tokens."""
    for key in ("shapes", "buffers", "loss", "cached", "recomputed"):
        assert old.get(key) == new.get(key), f"{name}: {key}"
    assert torch.equal(old["logits"], new["logits"]), f"{name}: logits"
    assert old["logits"].abs().max() > 0.1
    for key in ("state", "grads"):
        assert list(old[key]) == list(new[key]), f"{name}: names in {key}"
        for parameter, tensor in old[key].items():
            assert torch.equal(tensor, new[key][parameter]), f"{name}: {key} of {parameter}"
    assert old["grads"]


def test_errors_are_as_before(tried):
    """What GPT-NeoX refuses is refused with an error of the same type."""
    for name in grid.WRONG:
        old, new = (runs(1)[f"wrong: {name}"][0] for runs in (tried.plain_runs, tried.new_runs))
        assert old["error"] == new["error"], (name, old["message"], new["message"])
    message = tried.new_runs(1)["wrong: heads do not divide hidden"][0]["message"]
    assert "set head_dim" in message


def test_new_arguments_that_cannot_work_are_refused(tried):
    for name in grid.REFUSED:
        result = tried.new_runs(1)[f"wrong: {name}"][0]
        assert result.get("error") == "ConfigError", (name, result.get("traceback"))
        assert name in result["message"], result["message"]
