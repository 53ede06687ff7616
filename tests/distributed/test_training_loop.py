"""The loop around the steps: saving, stopping by signal, resuming, diagnostics, and what is done with NaN."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.test_training_layouts import GPT2, LLAMA, STEPS, figures, values_for, write_data
from tests.helpers.distributed import run_distributed


def run(folder, name, world_size=1, **settings):
    """pretrain() with a run folder of that name; returns the iteration reached."""
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import pretrain

    values = values_for(f"{folder}/text_document", f"{folder}/{name}", world_size, **settings)
    return pretrain(NeoXArgs.from_dict(values))


def records(folder, name):
    return [json.loads(line) for line in (Path(folder) / name / "train_log.jsonl").read_text().splitlines()]


def saved(folder):
    return sorted(int(path.name.removeprefix("global_step")) for path in Path(folder).glob("global_step*"))


def signal_at(iteration, number, rank, wanted_rank):
    """Make this process send itself a signal during the step that ends in `iteration`."""
    from megatron.training import run as module

    original = module.train_step

    def train_step(neox_args, engine, data):
        if neox_args.iteration + 1 == iteration and rank == wanted_rank:
            os.kill(os.getpid(), number)
        return original(neox_args, engine, data)

    module.train_step = train_step
    return lambda: setattr(module, "train_step", original)


def stop_and_resume(rank, world_size, folder):
    """Only the last rank gets the signal; both stop after the same step, save, and go on later."""
    layout = dict(**LLAMA, pipe_parallel_size=2, checkpoint_factor=100)
    whole = run(folder, "whole", world_size, **layout, save=f"{folder}/whole_saved")
    undo = signal_at(3, signal.SIGTERM, rank, world_size - 1)
    stopped = run(folder, "parts", world_size, **layout, save=f"{folder}/saved", load=f"{folder}/saved")
    undo()
    resumed = run(folder, "parts", world_size, **layout, save=f"{folder}/saved", load=f"{folder}/saved")
    again = run(folder, "again", world_size, **layout, load=f"{folder}/saved")  # nothing left to do
    return whole, stopped, resumed, again


def test_signal_to_one_rank_stops_all(tmp_path):
    write_data(tmp_path)
    by_rank = run_distributed(2, stop_and_resume, str(tmp_path), tmp_path=tmp_path)
    assert by_rank == [(STEPS, 3, STEPS, STEPS)] * 2
    assert saved(tmp_path / "saved") == [3, STEPS] and saved(tmp_path / "whole_saved") == [STEPS]
    wanted, evaluations = figures(tmp_path, "whole")
    steps, others = figures(tmp_path, "parts")
    assert (steps == wanted).all() and (others == evaluations).all()  # fp32, same layout: the same numbers
    assert (tmp_path / "parts" / "loss_curve.png").stat().st_size > 5000
    assert [sorted(r) for r in records(tmp_path, "again")] == [["iteration", "valid_loss", "valid_ppl"],
                                                                ["iteration", "test_loss", "test_ppl"]]  # fmt: skip


def save_and_exit(rank, world_size, folder):
    model = dict(**LLAMA, eval_iters=0)
    first = run(folder, "a", **model, save=f"{folder}/a", checkpoint_factor=4, extra_save_iters=[0, 5])
    second = run(folder, "b", **model, save=f"{folder}/b", checkpoint_factor=2, checkpoint_scale="log", exit_interval=5)
    return first, second


def test_when_checkpoints_are_written(tmp_path):
    write_data(tmp_path)
    assert run_distributed(1, save_and_exit, str(tmp_path), tmp_path=tmp_path) == [(STEPS, 5)]
    assert saved(tmp_path / "a") == [0, 4, 5, STEPS]
    assert saved(tmp_path / "b") == [1, 2, 4, 5]
    assert not any("valid_loss" in r for r in records(tmp_path, "a"))
    assert (tmp_path / "a" / "train_log.jsonl").exists()


def diagnose(rank, world_size, folder, layouts):
    wanted = dict(log_grad_norm=True, log_param_norm=True, log_grad_pct_zeros=True, log_optimizer_states=True)
    for name, layout in layouts.items():
        run(folder, name, world_size, **{**GPT2, **wanted, "log_interval": 2, "train_iters": 3, **layout})


def test_diagnostics_do_not_depend_on_the_layout(tmp_path):
    write_data(tmp_path)
    one = {"one": {}}
    two = {
        "tp2": dict(model_parallel_size=2),
        "pp2": dict(pipe_parallel_size=2),
        "zero2": dict(zero_optimization={"stage": 2}),
        "zero3": dict(zero_optimization={"stage": 3}),
    }
    run_distributed(1, diagnose, str(tmp_path), one, tmp_path=tmp_path)
    run_distributed(2, diagnose, str(tmp_path), two, tmp_path=tmp_path)
    wanted = [per_parameter(record) for record in records(tmp_path, "one") if "loss" in record]
    assert len(wanted) == 2  # after steps 2 and 3
    parameters = 1 + 1 + 2 * 12 + 2  # embedding, positions, two layers, last norm; the output layer is tied
    assert len(wanted[0]) == 3 * parameters
    for name in two:
        found = [per_parameter(record) for record in records(tmp_path, name) if "loss" in record]
        assert [sorted(figures) for figures in found] == [sorted(figures) for figures in wanted], name
        for ours, expected in zip(found, wanted, strict=True):
            for figure, value in expected.items():
                # Gradients of key biases are 0 but for rounding, so which entries are exactly 0 is chance.
                tolerance = 3.0 if "pct_grad_zeros" in figure else 2e-3
                assert ours[figure] == pytest.approx(value, abs=tolerance), (name, figure)
    for record in records(tmp_path, "one"):
        if "loss" in record:
            norms = [value for key, value in record.items() if key.startswith("gradient_norms/")]
            assert np.linalg.norm(norms) == pytest.approx(record["grad_norm"], rel=1e-5)
            assert record["optimizer_state_norms/exp_avg"] > 0


def per_parameter(record):
    """Figures by parameter, under one name in both forms of the model."""
    kinds = ("gradient_norms/", "parameter_norms/", "pct_grad_zeros/")
    found = {key.replace("/sequential.", "/"): value for key, value in record.items() if key.startswith(kinds)}
    return {key.replace("tied_modules.embed", "0"): value for key, value in found.items()}


def spoil(rank, world_size, folder, kind):
    """A loss that is no number in step 4, or from step 4 on."""
    from megatron.errors import NeoXError
    from megatron.training import engine as module

    original = module.cross_entropy

    def cross_entropy(neox_args):
        def loss(logits, targets):
            spoilt = neox_args.iteration == 3 or (neox_args.iteration > 3 and kind == "for ever")
            return original(neox_args)(logits, targets) * (float("nan") if spoilt else 1.0)

        return loss

    module.cross_entropy = cross_entropy
    settings = dict(**LLAMA, save=f"{folder}/saved", checkpoint_factor=1, eval_iters=0, train_iters=12)
    if kind == "once":
        return run(folder, kind, **settings)
    with pytest.raises(NeoXError, match="iteration 6: the loss has not been finite for 3 steps in a row"):
        run(folder, kind, **settings)
    return None


@pytest.mark.parametrize("kind", ["once", "for ever"])
def test_losses_that_are_no_numbers(kind, tmp_path):
    write_data(tmp_path)
    (reached,) = run_distributed(1, spoil, str(tmp_path), kind, tmp_path=tmp_path)
    losses = [record["loss"] for record in records(tmp_path, kind)]
    if kind == "once":  # the step was skipped and the weights are as good as before
        assert reached == 12 and losses[3] is None and None not in losses[4:]
        assert saved(tmp_path / "saved") == [1, 2, 3, *range(5, 13)]
    else:
        assert losses[3:] == [None] * 3
        assert saved(tmp_path / "saved") == [1, 2, 3]


def evaluate_characters(rank, world_size, folder):
    """char_level_ppl with a tokenizer whose tokens are two characters each: exp(loss * tokens / characters)."""
    from types import SimpleNamespace

    from megatron.neox_arguments import NeoXArgs
    from megatron.training import pretrain

    values = values_for(f"{folder}/text_document", f"{folder}/run", world_size, **LLAMA, char_level_ppl=True,
                        train_iters=2, profile=True, profile_step_start=1, profile_step_stop=2)  # fmt: skip
    args = NeoXArgs.from_dict(values)
    args.tokenizer = SimpleNamespace(detokenize=lambda tokens: "ab" * len(tokens), eod=0)
    pretrain(args)


def test_character_perplexity_and_profile(tmp_path):
    write_data(tmp_path)
    run_distributed(1, evaluate_characters, str(tmp_path), tmp_path=tmp_path)
    evaluations = [record for record in records(tmp_path, "run") if "valid_loss" in record]
    assert evaluations
    for record in evaluations:
        assert record["valid_ppl"] == pytest.approx(np.exp(record["valid_loss"]))
        assert record["valid_char_ppl"] == pytest.approx(np.exp(record["valid_loss"] / 2), rel=1e-5)
    (trace,) = (tmp_path / "run").glob("*.pt.trace.json")
    assert "aten::mm" in trace.read_text()
