"""Eight steps of GPT-NeoX's own training, reproduced: data order, loss, schedule, clipping, AdamW."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import LOSS

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "data_train" / "train_log.json").read_text())
ZERO_1 = dict(zero_optimization={"stage": 1})
HALF = dict(train_micro_batch_size_per_gpu=2)
ONE_RANK = [
    dict(pipe_parallel_size=1),
    dict(pipe_parallel_size=0),
    dict(pipe_parallel_size=0, **ZERO_1),
    dict(pipe_parallel_size=1, **HALF, gradient_accumulation_steps=2),
]
TWO_RANKS = [
    dict(pipe_parallel_size=1, model_parallel_size=2, **ZERO_1),
    dict(pipe_parallel_size=0, model_parallel_size=2, **ZERO_1),
    dict(pipe_parallel_size=1, **HALF, **ZERO_1),
    dict(pipe_parallel_size=0, **HALF, **ZERO_1),
    dict(pipe_parallel_size=1, model_parallel_size=2),
    dict(pipe_parallel_size=2, **HALF),
    dict(pipe_parallel_size=0, **HALF),
]
"""Settings that divide the golden run's global batch of 4 rows, or its model, in other ways."""


def case6_values(folder, **layout):
    """The golden run's settings, with its data in `folder`."""
    return {
        **yaml.safe_load((HERE / "data_train" / "case6_config.yml").read_text()),
        "vocab_file": str(HERE / "data_index" / "tiny_tokenizer.json"),
        "data_path": str(Path(folder) / "enwik8_tiny_text_document"),
        "padded_vocab_size": 384,
        "train_batch_size": 4,
        "gradient_accumulation_steps": None,
        **layout,
    }


def train_as_gpt_neox(rank, world_size, folder, layouts):
    """For each layout, from GPT-NeoX's initial weights: ([(loss, lr) of eight steps], (first row, tokens read)).

    Tokens int64 [8 steps, rows of this rank, 33]; first row: where in the global batch these rows belong.
    """
    from megatron import mpu
    from megatron.data import build_train_valid_test_data_iterators
    from megatron.initialize import initialize_megatron
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import setup_model_and_optimizer, train_step

    results = []
    for layout in layouts:
        args = NeoXArgs.from_dict(case6_values(folder, **layout))
        initialize_megatron(args)
        args.build_tokenizer()
        engine = setup_model_and_optimizer(args)
        copy_initial_weights(engine)
        train, _, _ = build_train_valid_test_data_iterators(args)
        read = []
        data = None if train is None else recorded(train, read)
        steps = [train_step(args, engine, data) for _ in range(args.train_iters)]
        rows = args.train_batch_size // mpu.get_data_parallel_world_size()
        tokens = np.stack(read).reshape(8, rows, 33) if read else np.zeros((8, 0, 33), int)
        first = mpu.get_data_parallel_rank() * rows
        results.append(([(step["loss"], step["lr"]) for step in steps], (first, tokens)))
    return results


def recorded(iterator, read):
    """The same batches, with their tokens kept in `read`."""
    for batch in iterator:
        read.append(batch["text"].numpy().copy())
        yield batch


@torch.no_grad()
def copy_initial_weights(engine):
    from megatron import mpu

    initial = np.load(HERE / "data_train" / "initial_params.npz")
    size, rank = mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()
    for name, parameter in engine.module.named_parameters():
        name = name.removeprefix("sequential.")
        parameter.copy_(torch.from_numpy(shard(name, initial[name], size, rank)))
    if engine.zero_optimization():  # it steps a copy of the weights
        engine.optimizer._restore_from_bit16_weights()


def shard(name, whole, size, rank):
    """This rank's rows or columns, written out by hand for the one geometry of this case."""
    if size == 1 or "layernorm" in name or "norm.scale" in name:
        return whole
    if "query_key_value" in name:  # q 64 rows, k 32, v 32
        parts = np.split(whole, [64, 96])
    elif "linear1" in name:  # two branches
        parts = np.split(whole, 2)
    elif "dense" in name or "linear2" in name:
        return np.split(whole, size, axis=1)[rank]
    else:
        parts = [whole]
    return np.concatenate([np.split(part, size)[rank] for part in parts])


@pytest.fixture
def data(tmp_path):
    for source in (HERE / "data_index").glob("enwik8_tiny_*"):
        shutil.copy(source, tmp_path / source.name)
    return str(tmp_path)


def faults(layout, steps, first, tokens):
    """In what one rank's run at one layout differs from GPT-NeoX's."""
    rates = [lr for _, lr in steps]
    batches = np.load(HERE / "data_index" / "case6_batches.npy")[:, first : first + tokens.shape[1]]
    found = []
    if rates != pytest.approx([entry["lr_before"] for entry in GOLDEN], rel=1e-9):
        found.append(f"{layout}: learning rates {rates}")
    if not np.array_equal(tokens, batches):
        found.append(f"{layout}: other tokens")
    difference = largest_loss_difference(steps)
    if not difference <= LOSS:
        found.append(f"{layout}: losses differ by {difference:.2g}")
    return found


def largest_loss_difference(steps):
    """Over the eight steps, from the golden losses."""
    return np.abs(np.subtract([loss for loss, _ in steps], [entry["lm_loss"] for entry in GOLDEN])).max()


@pytest.mark.parametrize("ranks, layouts", [(1, ONE_RANK), (2, TWO_RANKS)], ids=["one rank", "two ranks"])
def test_eight_steps(ranks, layouts, data, tmp_path):
    by_rank = run_distributed(ranks, train_as_gpt_neox, data, layouts, tmp_path=tmp_path)
    found = []
    for number, layout in enumerate(layouts):
        runs = [results[number] for results in by_rank]
        assert len({str(steps) for steps, _ in runs}) == 1, f"{layout}: the ranks report different steps"
        rows = {first + row for _, (first, tokens) in runs for row in range(tokens.shape[1])}
        assert rows == set(range(4)), f"{layout}: not every row of the batch was read"
        for steps, (first, tokens) in runs:
            found += faults(layout, steps, first, tokens)
    assert not found, "\n".join(found)


def test_a_batch_over_two_ranks_is_the_batch_of_one(data, tmp_path):
    """Each rank with the golden micro batch of 4, as GPT-NeoX runs DP 2: twice the rows per step, 64 samples in all."""
    whole = dict(pipe_parallel_size=1, train_batch_size=8)
    one = dict(whole, train_micro_batch_size_per_gpu=8)
    two = dict(whole, train_micro_batch_size_per_gpu=4, **ZERO_1)
    ((alone, (_, tokens)),) = run_distributed(1, train_as_gpt_neox, data, [one], tmp_path=tmp_path)[0]
    ranks = [results[0] for results in run_distributed(2, train_as_gpt_neox, data, [two], tmp_path=tmp_path)]
    assert np.array_equal(tokens, np.concatenate([read for _, (_, read) in ranks], axis=1))
    for together, _ in ranks:
        assert [lr for _, lr in together] == [lr for _, lr in alone]
        assert np.abs(np.subtract([loss for loss, _ in together], [loss for loss, _ in alone])).max() <= LOSS
    assert list(Path(data).glob("*_train_indexmap_64ns_*"))


def test_the_golden_run_can_tell_a_difference():
    """The losses move by far more than the tolerance from step to step, so a wrong batch or rate is seen."""
    losses = [entry["lm_loss"] for entry in GOLDEN]
    assert len(losses) == 8 and np.abs(np.diff(losses)).min() > 1e3 * LOSS
