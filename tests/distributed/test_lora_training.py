"""Adapters trained on a saved base, through DeepSpeed's engines: every layout, resumed, read by others, and merged."""

import os

import pytest

from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import LOSS, TRAJECTORY

LORA = dict(rank=3, alpha=6.0, targets=["query_key_value", "dense", "linear1", "linear2"])
COMMON = dict(
    **WIDE_NON_DIVISIBLE, seq_length=16, max_position_embeddings=16, checkpoint_factor=10, no_weight_tying=False,
    activation="swiglu", norm="rmsnorm", optimizer={"type": "adam", "params": {"lr": 3e-2}}, weight_decay=0.1,
    gradient_clipping=1.0,
)  # fmt: skip
LOGGED = dict(log_grad_norm=True, log_param_norm=True)
DP2 = dict(pipe_parallel_size=0, global_num_gpus=2)
LAYOUTS = {
    1: {
        "plain": dict(),
        "recomputed": dict(checkpoint_activations=True),
        "bf16": dict(precision="bfloat16"),
    },
    2: {
        "tp2": dict(model_parallel_size=2, sequence_parallel=True),
        "pp2": dict(pipe_parallel_size=2),
        "pp2 recomputed": dict(pipe_parallel_size=2, checkpoint_activations=True, fused_loss_chunk=8),
        "pp2 bf16": dict(pipe_parallel_size=2, precision="bfloat16"),
        "dp2": DP2,
        **{f"dp2 zero{stage}": dict(DP2, zero_optimization={"stage": stage}) for stage in (2, 3)},
    },
}
"""By number of processes."""
READ = ("bf16", "tp2", "pp2", "dp2 zero3")
"""One of each form of checkpoint."""


def _args(folder, load, **settings):
    args = {**COMMON, "load": load and os.path.join(folder, load), **settings}
    args.setdefault("global_num_gpus", args.get("model_parallel_size", 1) * max(args.get("pipe_parallel_size", 0), 1))
    return tiny_args(**args)


def _write_base(rank, world_size, folder):
    """A checkpoint without adapters; the loss of its next step."""
    from megatron.checkpointing import save_checkpoint
    from tests.helpers.engines import build_engine, train

    args = _args(folder, None, save=os.path.join(folder, "base"))
    engine = build_engine(args)
    train(args, engine, 3)
    save_checkpoint(args, 3, engine)
    return train(args, engine, 1, first=100)


def _adapt(rank, world_size, folder, layouts):
    """{layout: (losses of three steps and two more, losses of those two resumed)}"""
    from megatron.checkpointing import save_checkpoint
    from megatron.training.diagnostics import Diagnostics
    from tests.helpers.engines import build_engine, train

    found = {}
    for name, settings in layouts.items():
        args = _args(folder, "base", finetune=True, lora=LORA, save=os.path.join(folder, name), **LOGGED, **settings)
        engine = build_engine(args)
        assert args.iteration == 0
        trained = {key for key, p in engine.module.named_parameters() if p.requires_grad}
        assert trained and all(".lora." in key for key in trained), name
        figures = Diagnostics(args, engine)
        figures.want(args.train_iters)
        losses = train(args, engine, 3, first=100)
        norms = figures.take()
        assert rank != 0 or norms.keys() >= {f"gradient_norms/{name}" for name in trained}, name
        assert all(".lora." in key for key in norms), name
        save_checkpoint(args, 3, engine)
        losses += train(args, engine, 2, first=103)
        args = _args(folder, name, lora=LORA, **settings)
        engine = build_engine(args)
        assert args.iteration == 3
        found[name] = losses, train(args, engine, 2, first=103)
    return found


def _read(rank, world_size, folder, names):
    """{layout: (loss of the next step as one rank reads the checkpoint, and as it reads the merged one)}"""
    from tests.helpers.engines import build_engine, train
    from tools.ckpts import merge_lora

    found = {}
    for name in names:
        args = _args(folder, name, lora=LORA, no_load_optim=True)
        read = train(args, build_engine(args), 1, first=103)
        source, out = os.path.join(folder, name), os.path.join(folder, f"{name} merged")
        yml = os.path.join(folder, "model.yml")
        assert merge_lora.main(["--input_dir", source, "--output_dir", out, "--config_file", yml]) == 0
        args = _args(folder, f"{name} merged", no_load_optim=True)
        found[name] = read + train(args, build_engine(args), 1, first=103)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, loss of the base, what _adapt found, what _read found)"""
    import yaml

    folder = tmp_path_factory.mktemp("lora")
    args = {**tiny_args(**COMMON, lora=LORA).given()}
    (folder / "model.yml").write_text(yaml.safe_dump({key: value for key, value in args.items() if value is not None}))
    ((base,),) = run_distributed(1, _write_base, str(folder), tmp_path=folder)
    found = {}
    for processes, layouts in LAYOUTS.items():
        found.update(run_distributed(processes, _adapt, str(folder), layouts, tmp_path=folder)[0])
    (read,) = run_distributed(1, _read, str(folder), READ, tmp_path=folder)
    return base, found, read


def _tolerance(name, fine):
    return 3e-2 if "bf16" in name else fine


def test_the_first_loss_is_the_base_s_and_training_lowers_it(runs):
    base, found, _ = runs
    for name, (losses, _) in found.items():
        if not name.startswith("dp2"):
            assert abs(losses[0] - base) <= _tolerance(name, LOSS), name
            assert abs(losses[1] - losses[0]) > 1e-3, name


def test_every_layout_trains_alike(runs):
    _, found, _ = runs
    for name, (losses, _) in found.items():
        reference = found["dp2" if name.startswith("dp2") else "plain"][0]
        worst = max(abs(one - other) for one, other in zip(losses, reference, strict=True))
        assert worst <= _tolerance(name, TRAJECTORY), (name, losses, reference)


def test_resumed_runs_continue_as_if_uninterrupted(runs):
    _, found, _ = runs
    for name, (losses, resumed) in found.items():
        assert max(abs(one - other) for one, other in zip(losses[3:], resumed, strict=True)) <= LOSS, name


def test_one_rank_reads_every_checkpoint_and_merged_it_is_the_same_function(runs):
    _, found, read = runs
    for name, (unmerged, merged) in read.items():
        expected = found[name][0][3]
        if not name.startswith("dp2"):  # two replicas have other batches
            assert abs(unmerged - expected) <= _tolerance(name, LOSS), name
        assert abs(merged - unmerged) <= _tolerance(name, LOSS), name
