"""Optimizers under ZeRO, activation checkpointing and train_epochs, through pretrain()."""

import numpy as np

from tests.distributed.test_training_layouts import LLAMA, STEPS, figures, train_layouts, values_for, write_data
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import TRAJECTORY


def optimizer(kind, stage, **params):
    return dict(optimizer={"type": kind, "params": params}, zero_optimization={"stage": stage})


SAME = {
    "adam": {
        "plain": {},
        "cpu_torch_adam": dict(optimizer={"type": "cpu_torch_adam", "params": {"lr": 4e-3}}),
        "timed": dict(wall_clock_breakdown=True, steps_per_print=2),
        "timed pp2": dict(wall_clock_breakdown=True, steps_per_print=2, pipe_parallel_size=2),
        "checkpointed": dict(checkpoint_activations=True),
        "checkpointed pp2": dict(checkpoint_activations=True, pipe_parallel_size=2),
        "checkpointed tp2": dict(
            checkpoint_activations=True,
            model_parallel_size=2,
            partition_activations=True,
            contiguous_checkpointing=True,
        ),
        "offload": dict(
            optimizer={"type": "cpu_torch_adam", "params": {"lr": 4e-3}},
            zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
        ),
    },
    "sgd": {f"sgd {stage}": optimizer("sgd", stage, lr=0.1, momentum=0.9) for stage in (0, 1)},
    "lion": {f"lion {stage}": optimizer("Lion", stage, lr=1e-3) for stage in (0, 2)},
    "madgrad": {f"madgrad {stage}": optimizer("madgrad_wd", stage, lr=1e-2) for stage in (0, 3)},
    "sm3": {"sm3": optimizer("sm3", 0, lr=0.05, momentum=0.9)},
}
"""Settings that must train alike, by group."""


def test_settings_that_train_alike(tmp_path):
    write_data(tmp_path)
    everything = {name: settings for group in SAME.values() for name, settings in group.items()}
    run_distributed(2, train_layouts, str(tmp_path), everything, LLAMA, tmp_path=tmp_path)
    for group in SAME.values():
        wanted, evaluations = figures(tmp_path, next(iter(group)))
        assert wanted[-1, 0] < wanted[0, 0] - 0.1, next(iter(group))
        for name in group:
            steps, others = figures(tmp_path, name)
            assert np.abs(steps - wanted).max() <= TRAJECTORY and np.abs(others - evaluations).max() <= TRAJECTORY, name


def train_epoch(rank, world_size, folder):
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import pretrain

    epoch = dict(train_iters=None, train_epochs=1, eval_iters=0)
    values = values_for(f"{folder}/text_document", f"{folder}/epoch", world_size, **LLAMA, **epoch)
    args = NeoXArgs.from_dict(values)
    return pretrain(args), args.train_iters


def test_one_epoch(tmp_path):
    """Every sequence of the training documents once: (tokens - 1) / seq_length, in batches of 4."""
    from megatron.data.indexed_dataset import make_dataset

    documents = make_dataset(write_data(tmp_path))
    tokens = sum(len(documents[index]) for index in range(round(0.8 * len(documents))))
    batches = (tokens - 1) // 32 // 4
    assert run_distributed(1, train_epoch, str(tmp_path), tmp_path=tmp_path) == [(batches, batches)]
    steps, _ = figures(tmp_path, "epoch")
    assert len(steps) == batches > STEPS
    assert steps[-1, 2] < 2 * 1e-4  # the schedule ends with the epoch


def evaluate_twice(rank, world_size, folder):
    """Losses of two evaluations of the same batches with dropout in the model, and whether it is on again after."""
    from megatron.data import build_train_valid_test_data_iterators
    from megatron.initialize import initialize_megatron
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import evaluate, setup_model_and_optimizer

    results = []
    for stages in (0, 1):
        settings = {**LLAMA, "hidden_dropout": 0.5, "pipe_parallel_size": stages}
        args = NeoXArgs.from_dict(values_for(f"{folder}/text_document", None, world_size, **settings))
        initialize_megatron(args)
        engine = setup_model_and_optimizer(args)
        _, valid, _ = build_train_valid_test_data_iterators(args)
        batches = [next(valid) for _ in range(args.eval_iters * args.gradient_accumulation_steps)]
        losses = [evaluate(args, engine, iter(batches))["loss"] for _ in range(2)]
        results.append((*losses, engine.module.training))
    return results


def test_evaluation_has_no_dropout(tmp_path):
    write_data(tmp_path)
    (results,) = run_distributed(1, evaluate_twice, str(tmp_path), tmp_path=tmp_path)
    for first, second, training in results:
        assert first == second and training
    assert abs(results[0][0] - results[1][0]) < TRAJECTORY
