"""A resumed run has the losses of the uninterrupted one, to the last bit, in every parallel layout."""

import os

import pytest

from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import WIDE_NON_DIVISIBLE

DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)
COMMON = dict(**WIDE_NON_DIVISIBLE, **DROPOUT, seq_length=16, max_position_embeddings=16)

ONE = {
    "pp0": dict(pipe_parallel_size=0, gradient_accumulation_steps=2),
    "pp1": dict(pipe_parallel_size=1, gradient_accumulation_steps=2),
    "pp1 tied": dict(pipe_parallel_size=1, no_weight_tying=False, pos_emb="learned"),
    "pp0 tied rpe": dict(pipe_parallel_size=0, no_weight_tying=False, pos_emb="rpe"),
    "pp0 bf16": dict(pipe_parallel_size=0, precision="bfloat16"),
    "pp1 bf16": dict(pipe_parallel_size=1, precision="bfloat16"),
    "pp1 bf16 zero1": dict(pipe_parallel_size=1, precision="bfloat16", zero_optimization={"stage": 1}),
    "recomputed activations": dict(pipe_parallel_size=1, checkpoint_activations=True),
}
TENSOR = {
    "tp2 pp0": dict(pipe_parallel_size=0, model_parallel_size=2),
    "tp2 pp1 sequence parallel": dict(pipe_parallel_size=1, model_parallel_size=2, sequence_parallel=True),
    "tp2 zero1": dict(pipe_parallel_size=0, model_parallel_size=2, zero_optimization={"stage": 1}),
}
PIPE = {
    "pp2": dict(pipe_parallel_size=2, gradient_accumulation_steps=2),
    "pp2 tied": dict(pipe_parallel_size=2, no_weight_tying=False),
}
DATA = {
    "dp2": dict(pipe_parallel_size=0, global_num_gpus=2),
    "dp2 zero1": dict(pipe_parallel_size=1, global_num_gpus=2, zero_optimization={"stage": 1}),
    "dp2 pp1 bf16": dict(pipe_parallel_size=1, global_num_gpus=2, precision="bfloat16"),
    "dp2 zero2": dict(pipe_parallel_size=0, global_num_gpus=2, zero_optimization={"stage": 2}),
    "dp2 zero3": dict(pipe_parallel_size=0, global_num_gpus=2, zero_optimization={"stage": 3}),
}


def _run(rank, world_size, folder, cases):
    from megatron.checkpointing import save_checkpoint
    from tests.helpers.engines import build_engine, train

    results = {}
    for name, settings in cases.items():
        root = os.path.join(folder, name.replace(" ", "_"))
        args = tiny_args(**{**COMMON, **settings}, save=root, checkpoint_factor=10)
        engine = build_engine(args)
        train(args, engine, 2)
        save_checkpoint(args, 2, engine)
        expected = train(args, engine, 2, first=2)

        other = args.update(load=root, iteration=None, seed=4321)
        engine = build_engine(other)
        resumed = train(other, engine, 2, first=2)

        results[name] = [other.iteration, expected, resumed, None]
        if name == next(iter(cases)):
            without = args.update(load=root, iteration=None, seed=4321, no_load_rng=True)
            results[name][-1] = train(without, build_engine(without), 2, first=2)
    return results


def _check(per_rank, cases):
    faults = []
    for rank, results in enumerate(per_rank):
        assert set(results) == set(cases)
        for name, (reached, expected, resumed, other_noise) in results.items():
            if reached != 2 or resumed != expected:
                faults.append(f"{name}, rank {rank}: iteration {reached}, {resumed} instead of {expected}")
            if other_noise == expected:
                faults.append(f"{name}, rank {rank}: dropout has no influence, so the random states are not tested")
    assert not faults, "\n".join(faults)


def test_one_process(tmp_path):
    _check(run_distributed(1, _run, str(tmp_path), ONE, tmp_path=tmp_path), ONE)


# One start for each kind: DeepSpeed keeps process-wide state of an engine that misleads one of another layout.
@pytest.mark.parametrize("cases", [TENSOR, PIPE, DATA], ids=["tensor", "pipe", "data"])
def test_two_processes(tmp_path, cases):
    _check(run_distributed(2, _run, str(tmp_path), cases, tmp_path=tmp_path), cases)
