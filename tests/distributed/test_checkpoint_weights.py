"""Weights taken from a checkpoint of another layout; layouts that cannot be resumed are refused with advice."""

import os

import pytest

from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import LOSS

COMMON = dict(**WIDE_NON_DIVISIBLE, seq_length=16, max_position_embeddings=16, checkpoint_factor=10)

WRITERS = {
    "pp0": (1, dict(pipe_parallel_size=0)),
    "pp2": (2, dict(pipe_parallel_size=2)),
    "dp2 zero3": (2, dict(pipe_parallel_size=0, global_num_gpus=2, zero_optimization={"stage": 3})),
}
READERS = {
    "pp0": (1, dict(pipe_parallel_size=0)),
    "pp0 zero1": (1, dict(pipe_parallel_size=0, zero_optimization={"stage": 1})),
    "pp0 zero3": (1, dict(pipe_parallel_size=0, zero_optimization={"stage": 3})),
    "pp1 bf16 zero1": (1, dict(pipe_parallel_size=1, precision="bfloat16", zero_optimization={"stage": 1})),
    "pp1 bf16": (1, dict(pipe_parallel_size=1, precision="bfloat16")),
    "pp2": (2, dict(pipe_parallel_size=2)),
    "dp2 zero3": (2, dict(pipe_parallel_size=0, global_num_gpus=2, zero_optimization={"stage": 3})),
    "dp2 zero1": (2, dict(pipe_parallel_size=1, global_num_gpus=2, zero_optimization={"stage": 1})),
}


def _args(folder, writer, settings, **more):
    return tiny_args(**{**COMMON, **settings}, **{key: os.path.join(folder, writer) for key in more.pop("at")}, **more)


def _write(rank, world_size, folder, writer):
    """Three steps of a fast learner, so that its weights are far from any initial ones; the loss of the next step."""
    from megatron.checkpointing import save_checkpoint
    from tests.helpers.engines import build_engine, train

    args = _args(folder, writer, WRITERS[writer][1], at=["save"], optimizer=FAST)
    engine = build_engine(args)
    train(args, engine, 3)
    save_checkpoint(args, 3, engine)
    return train(args, engine, 1, first=100)


FAST = {"type": "adam", "params": {"lr": 3e-2}}
STILL = {"type": "adam", "params": {"lr": 1e-10}}


def _read(rank, world_size, folder, readers, writers):
    """{(reader, writer): (iteration, losses of two steps on one batch)} with a learning rate that changes nothing."""
    from tests.helpers.engines import build_engine, train

    found = {}
    for reader in readers:
        for writer in writers:
            settings = dict(READERS[reader][1], optimizer=STILL, min_lr=0.0)
            args = _args(
                folder, writer, settings, at=["load"], finetune=writer != "dp2 zero3", no_load_optim=True, seed=99
            )
            engine = build_engine(args)
            found[reader, writer] = (
                args.iteration,
                train(args, engine, 1, first=100) + train(args, engine, 1, first=100),
            )
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a checkpoint of each writer, and the losses of their next steps (data-parallel mean)."""
    folder = tmp_path_factory.mktemp("written")
    losses = {
        writer: run_distributed(processes, _write, str(folder), writer, tmp_path=folder)[0][0]
        for writer, (processes, _) in WRITERS.items()
    }
    return str(folder), losses


@pytest.mark.parametrize("kind", ["one", "pp2", "dp2"])
def test_weights_move_between_layouts(written, kind, tmp_path):
    folder, losses = written
    readers = [name for name in READERS if (READERS[name][0] == 1 if kind == "one" else name.startswith(kind))]
    writers = ["pp2", "dp2 zero3"] if kind == "one" else ["pp0", "dp2 zero3"]
    for found in run_distributed(READERS[readers[0]][0], _read, folder, readers, writers, tmp_path=tmp_path):
        assert set(found) == {(reader, writer) for reader in readers for writer in writers}
        for (reader, writer), (iteration, (first, second)) in found.items():
            assert iteration == (3 if writer == "dp2 zero3" else 0), (reader, writer)
            tolerance = 3e-2 if "bf16" in reader else LOSS
            if reader.startswith("dp2") == writer.startswith("dp2"):  # else the two runs have other batches
                assert abs(first - losses[writer]) <= tolerance, (reader, writer)
            assert abs(second - first) <= tolerance, f"{reader}, {writer}: the optimizer steps other weights"


def _tied(rank, world_size, folder, pipe_parallel_size, at):
    """Save, or load at another number of stages; the loss of the next step."""
    from megatron.checkpointing import save_checkpoint
    from tests.helpers.engines import build_engine, train

    settings = dict(pipe_parallel_size=pipe_parallel_size, no_weight_tying=False, optimizer=FAST)
    args = _args(folder, "tied", settings, at=[at], finetune=at == "load", seed=7 if at == "load" else 1)
    engine = build_engine(args)
    if at == "save":
        train(args, engine, 3)
        save_checkpoint(args, 3, engine)
    return train(args, engine, 1, first=100)


def test_tied_embedding_reaches_the_last_stage(tmp_path):
    saved = run_distributed(1, _tied, str(tmp_path), 0, "save", tmp_path=tmp_path)
    loaded = run_distributed(2, _tied, str(tmp_path), 2, "load", tmp_path=tmp_path)
    assert abs(loaded[0][0] - saved[0][0]) <= LOSS


def _refused(rank, world_size, folder, cases):
    from megatron.errors import CheckpointError
    from tests.helpers.engines import build_engine

    messages = {}
    for name, writer, settings in cases:
        try:
            build_engine(_args(folder, writer, settings, at=["load"]))
        except CheckpointError as error:
            messages[name] = str(error)
    return messages


def test_layouts_that_cannot_be_resumed(written, tmp_path):
    folder, _ = written
    cases = [
        ("pp", "pp2", dict(pipe_parallel_size=1)),
        ("form", "pp0", dict(pipe_parallel_size=1)),
        ("dp", "dp2 zero3", dict(pipe_parallel_size=0, zero_optimization={"stage": 3})),
        ("zero", "pp0", dict(pipe_parallel_size=0, zero_optimization={"stage": 1})),
        ("precision", "pp0", dict(pipe_parallel_size=0, precision="bfloat16")),
        ("decay", "pp0", dict(pipe_parallel_size=0, optimizer=FAST, weight_decay=0.0)),
    ]
    (found,) = run_distributed(1, _refused, folder, cases, tmp_path=tmp_path)
    assert "pipe_parallel_size: 2 in the checkpoint, 1 in the config" in found["pp"]
    assert "pipe_parallel_size: 0 in the checkpoint, 1 in the config" in found["form"]
    assert "data-parallel size: 2 in the checkpoint, 1 in this run" in found["dp"]
    assert "zero_optimization.stage: 0 in the checkpoint, 1 in the config" in found["zero"]
    assert "bf16 was off in the checkpoint's run" in found["precision"]
    for name in ("pp", "form", "dp", "zero", "precision"):
        assert "no_load_optim=true" in found[name]
    assert "does not fit this run's optimizer settings" in found["decay"]
