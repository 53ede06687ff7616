"""Widths that differ between layers, and inside of them, over ranks: tensor-parallel and pipeline-parallel models
compute and train as one process, under every ZeRO stage; their checkpoints load at other sizes."""

import numpy as np
import pytest

from tests.distributed.test_model_pipeline import _assert_same_training, _train_pipeline, _train_sequential
from tests.distributed.test_model_tensor_parallel import _assert_equal
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.engines import build_engine, train
from tests.helpers.model_runs import forward_backward
from tests.helpers.tolerances import LOSS, TRAJECTORY

NORMED = dict(activation="swiglu", norm="rmsnorm", ffn_hidden_size=48, qk_norm_type="per_head")
LAYERS = dict(hidden_size=88, num_attention_heads=12, num_kv_heads=[[12, 1], [4, 1], [2, 1]], head_dim=[10, 14, 6])
GROUPS = {"layer": [1, 2], "groups": [[10, 4], [14, 8]]}
MIXED = dict(hidden_size=88, num_attention_heads=12, num_kv_heads=[[12, 2], [3, 1]], head_dim=[[12, 3], GROUPS])
CASES = {
    "layers": dict(LAYERS, **NORMED),
    "layers, joint norm, sequence parallel": dict(
        LAYERS, use_qk_layernorm=True, norm="rmsnorm", sequence_parallel=True
    ),
    "layers, relative bias, one residual": dict(LAYERS, pos_emb="rpe", gpt_j_residual=True),
    "mixed": dict(MIXED, **NORMED, checkpoint_activations=True, checkpoint_num_layers=2),
    "mixed, norms over all heads": dict(MIXED, qk_norm_type="full_width", sequence_parallel=True),
    "mixed, alibi, one residual": dict(MIXED, pos_emb="alibi", gpt_j_residual=True),
}
"""In the last layer of all, ranks share key/value heads: 2 heads and 4 ranks, and 1 of a group's and 2 or 4 ranks."""


def _rank(rank, world_size, names):
    results = {
        name: forward_backward(dict(CASES[name], num_layers=3, model_parallel_size=world_size)) for name in names
    }
    return results if rank == 0 else [loss for loss, *_ in results.values()]


def test_tensor_parallel_equals_one_rank(tmp_path):
    (single,) = run_distributed(1, _rank, list(CASES), tmp_path=tmp_path)
    for ranks, names in ((2, ["layers", "mixed, norms over all heads"]), (4, list(CASES))):
        first, *others = run_distributed(ranks, _rank, names, tmp_path=tmp_path)
        for number, name in enumerate(names):
            _assert_equal(name, single[name], first[name])
            assert all(losses[number] == first[name][0] for losses in others), f"{name}: ranks disagree on the loss"


TRAINED = {name: dict(CASES[name], num_layers=3) for name in ("layers", "mixed")}
STAGES = (0, 1, 2, 3)
FAST = {"type": "adam", "params": {"lr": 1e-2}}


def _zero(settings, stage, world_size):
    args = tiny_args(**settings, zero_optimization={"stage": stage}, global_num_gpus=world_size, optimizer=FAST)
    engine = build_engine(args)
    return [train(args, engine, 1)[0] for _ in range(3)]  # of the same batch


def _two_ranks(rank, world_size):
    pipeline = {name: _train_pipeline(settings, 2, 1) for name, settings in TRAINED.items()}
    zero = {name: [_zero(TRAINED[name], stage, world_size) for stage in STAGES] for name in TRAINED}
    return pipeline, zero


def _sequential(rank, world_size):
    return {name: _train_sequential(settings) for name, settings in TRAINED.items()}


def test_stages_and_partitions_train_as_the_whole_model(tmp_path):
    """Two pipeline stages, whose layers have other widths; optimizer states, gradients and weights in pieces."""
    (sequential,) = run_distributed(1, _sequential, tmp_path=tmp_path)
    ranks = run_distributed(2, _two_ranks, tmp_path=tmp_path)
    for name, wanted in sequential.items():
        _assert_same_training(name, wanted, [pipeline[name] for pipeline, _ in ranks])
    for name, losses in ranks[0][1].items():
        assert losses[0][0] - losses[0][-1] > 0.01, f"{name}: nothing was learned"
        for stage in STAGES[1:]:
            assert np.abs(np.subtract(losses[stage], losses[0])).max() <= TRAJECTORY, (name, stage)


def _saved(name, folder, tp, world_size, **more):
    return tiny_args(
        **{**TRAINED[name], "save": folder, "seed": 1234, "optimizer": FAST, **more},
        model_parallel_size=tp, padded_vocab_size=256, global_num_gpus=world_size, checkpoint_factor=10,
    )  # fmt: skip


def _save(rank, world_size, folder):
    """Train at TP 2, save, and the loss of the next step."""
    from megatron.checkpointing import save_checkpoint

    losses = {}
    for name in TRAINED:
        args = _saved(name, f"{folder}/{name}", 2, world_size)
        engine = build_engine(args)
        train(args, engine, 3)
        save_checkpoint(args, 3, engine)
        losses[name] = train(args, engine, 1, first=100)[0]
    return losses


def _resume(rank, world_size, folder, tp, settings):
    losses = {}
    for name in TRAINED:
        args = _saved(name, None, tp, world_size, load=f"{folder}/{name}", seed=99, **settings)
        losses[name] = train(args, build_engine(args), 1, first=100)[0]
    return losses


def test_checkpoints_resume_and_load_at_another_size(tmp_path):
    folder = str(tmp_path / "runs")
    wanted = run_distributed(2, _save, folder, tmp_path=tmp_path)[0]
    for ranks, tp, settings in ((2, 2, {}), (1, 1, dict(finetune=True))):
        (found, *_) = run_distributed(ranks, _resume, folder, tp, settings, tmp_path=tmp_path)
        assert found == pytest.approx(wanted, abs=LOSS), (ranks, tp)
