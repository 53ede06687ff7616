"""Fewer key/value heads than tensor-parallel ranks: a run is that of one rank, in every number and on every path."""

import numpy as np
import pytest
import torch

from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import NARROW
from tests.helpers.model_runs import forward_backward, joined, named_parameters
from tests.helpers.tolerances import FORWARD, GRADIENT, LOSS, TRAJECTORY
from tests.unit.test_generation_model import NO_EOS, PROMPTS, generation_args

STEPS = 3
TWO_HEADS = dict(NARROW, norm="rmsnorm", activation="swiglu", ffn_hidden_size=48)
"""At 4 ranks each head is on two."""
ONE_HEAD = dict(hidden_size=40, num_attention_heads=4, num_kv_heads=1, head_dim=10, rotary_pct=0.4)
"""Multi-query: at 2 ranks an even share of the head each, at 4 ranks 2, 3, 2 and 3 of its 10 rows."""
FLASH = dict(attention_config=["flash"] * 2)

PASSES = {
    "two heads": TWO_HEADS,
    "two heads, sequence parallel": dict(TWO_HEADS, sequence_parallel=True, **FLASH),
    "two heads, per-head norms": dict(TWO_HEADS, qk_norm_type="per_head"),
    "two heads, joint norm, recomputed": dict(TWO_HEADS, use_qk_layernorm=True, checkpoint_activations=True),
    "one head": ONE_HEAD,
    "one head, alibi, sequence parallel": dict(ONE_HEAD, pos_emb="alibi", sequence_parallel=True, rotary_pct=1.0),
    "one head, norms over all heads": dict(ONE_HEAD, qk_norm_type="full_width", gpt_j_residual=True),
}
"""One forward and backward pass each."""
GENERATED = {"two heads", "one head", "one head, norms over all heads"}

RUNS = {
    "fp32": dict(TWO_HEADS),
    "zero 1, pipeline module": dict(
        ONE_HEAD,
        pipe_parallel_size=1,
        zero_optimization={"stage": 1},
        sequence_parallel=True,
        qk_norm_type="full_width",
    ),
    "zero 3": dict(ONE_HEAD, zero_optimization={"stage": 3}),
    "bf16": dict(ONE_HEAD, precision="bfloat16"),
    "bf16, pipeline module": dict(TWO_HEADS, precision="bfloat16", pipe_parallel_size=1),
}
"""Each way in which gradients are summed, counted in the norm, clipped and applied."""
RESUMED = ("zero 3", "bf16, pipeline module")


def _passes(rank, world_size, names):
    found = {name: forward_backward(dict(PASSES[name], model_parallel_size=world_size)) for name in names}
    generated = {name: _generate(dict(PASSES[name], model_parallel_size=world_size)) for name in GENERATED & set(names)}
    return (found if rank == 0 else {name: values[0] for name, values in found.items()}), generated


def _generate(settings):
    """(tokens, logits with the cache, tokens without it, bytes of this rank's cache)"""
    from megatron.initialize import initialize_megatron
    from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER, build_model
    from megatron.text_generation import InferenceRunner, stream_tokens

    args = generation_args(**settings, return_logits=True)
    initialize_megatron(args)
    model = build_model(args)
    # A hook lets one rank generate by the layers' own passes, as several do. Its other way sums in another order, and
    # is held against the layers in tests/unit/test_generation_decoding.py.
    model.local_layers()[FIRST_TRANSFORMER_LAYER][1].register_forward_hook(lambda *_: None)
    runner = InferenceRunner(args, model)
    *_, state = stream_tokens(args, runner, PROMPTS, eos_token_id=NO_EOS, maximum_tokens=10)
    used = runner.cache_bytes
    *_, anew = stream_tokens(args, runner, PROMPTS, eos_token_id=NO_EOS, maximum_tokens=10, recompute=True)
    return state.tokens.tolist(), state.logits.numpy(), anew.tokens.tolist(), used


@pytest.mark.parametrize("ranks, names", [(2, [name for name in PASSES if "one head" in name]), (4, list(PASSES))])
def test_passes_equal_one_rank(ranks, names, tmp_path):
    ((single, one_rank),) = run_distributed(1, _passes, names, tmp_path=tmp_path)
    (found, generated), *others = run_distributed(ranks, _passes, names, tmp_path=tmp_path)
    for name in names:
        (loss, initial, gradients), (wanted, wanted_initial, wanted_gradients) = found[name], single[name]
        assert abs(loss - wanted) <= LOSS, name
        assert all(losses[name] == loss for losses, _ in others), name
        assert gradients.keys() == initial.keys() == wanted_gradients.keys(), name
        for key, values in initial.items():
            assert np.array_equal(values, wanted_initial[key]), f"{name}: initial {key}"
        for key, values in gradients.items():
            difference = np.abs(values - wanted_gradients[key]).max()
            assert difference <= GRADIENT[torch.float32], f"{name}: gradient of {key} differs by {difference:.2g}"
    assert generated
    for name, (tokens, logits, anew, used) in generated.items():
        wanted, wanted_logits, _, wanted_bytes = one_rank[name]
        assert tokens == anew == wanted, name
        assert np.abs(logits - wanted_logits).max() <= FORWARD[torch.float32], name
        assert used * PASSES[name]["num_kv_heads"] == wanted_bytes, f"{name}: not one head on each rank"


def _settings(ranks, **settings):
    return dict(
        **settings, model_parallel_size=ranks, global_num_gpus=ranks,
        num_layers=1, seq_length=16, max_position_embeddings=16,
        gradient_clipping=0.5, log_grad_norm=True, log_param_norm=True, log_interval=1, checkpoint_factor=10,
        optimizer={"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}},
    )  # fmt: skip


def _steps(args, engine, first=0, steps=STEPS):
    """Losses, gradient norms and the figures of the log, one list or dictionary for all steps."""
    from megatron.training import train_step
    from megatron.training.diagnostics import Diagnostics

    diagnostics = Diagnostics(args, engine)
    engine.train()
    done, figures = [], {}
    for step in range(first, first + steps):
        diagnostics.want(step + 1)
        tokens = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(step))
        done.append(train_step(args, engine, iter([{"text": tokens}])))
        figures.update({f"{name}, step {step}": value for name, value in diagnostics.take().items()})
    return [step["loss"] for step in done], [step["grad_norm"] for step in done], figures


def _weights(engine):
    """Whole weights, the same on all ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in named_parameters(engine.module):
        own = safe_get_full_fp32_param(parameter) if hasattr(parameter, "ds_id") else parameter.detach()
        found[name] = joined(parameter, own).float().numpy()
    return found


def _train(rank, world_size, runs, folder):
    """{run: (losses, gradient norms, figures, whole weights)}; leaves a checkpoint of each in `folder`."""
    from megatron.checkpointing import save_checkpoint
    from tests.helpers.engines import build_engine

    found = {}
    for name, settings in runs.items():
        args = tiny_args(**_settings(world_size, **settings), save=f"{folder}/{name}")
        engine = build_engine(args)
        numbers = _steps(args, engine)
        weights = _weights(engine)
        save_checkpoint(args, STEPS, engine)
        found[name] = (*numbers, weights, _steps(args, engine, first=STEPS, steps=1)[:2])
    return found if rank == 0 else None


def _resume(rank, world_size, runs, folder):
    """{run: (weights, loss and norm of one more step)}, with the optimizer's state and another seed."""
    from tests.helpers.engines import build_engine

    found = {}
    for name, settings in runs.items():
        args = tiny_args(**_settings(world_size, **settings), load=f"{folder}/{name}", seed=99)
        engine = build_engine(args)
        found[name] = (_weights(engine), _steps(args, engine, first=args.iteration, steps=1)[:2])
    return found if rank == 0 else None


def _load(rank, world_size, runs, folder):
    """{run: whole weights} of the checkpoints at this number of ranks."""
    from megatron.checkpointing import load_model_weights
    from megatron.initialize import initialize_megatron
    from megatron.model.gpt2_model import build_model

    found = {}
    for name, settings in runs.items():
        args = tiny_args(**_settings(world_size, **settings), load=f"{folder}/{name}")
        initialize_megatron(args)
        model = build_model(args)
        assert load_model_weights(args, model) == STEPS
        found[name] = {key: joined(p, p.detach()).float().numpy() for key, p in named_parameters(model)}
    return found if rank == 0 else None


def _assert_same_weights(found, expected, what):
    assert found.keys() == expected.keys(), what
    for key, values in found.items():
        assert np.array_equal(values, expected[key]), f"{what}: {key}"


def test_runs_equal_one_rank_and_move_between_sizes(tmp_path):
    (single,) = run_distributed(1, _train, RUNS, str(tmp_path / "one"), tmp_path=tmp_path)
    found, *_ = run_distributed(4, _train, RUNS, str(tmp_path / "four"), tmp_path=tmp_path)
    for name in RUNS:
        half = "bf16" in name
        losses, norms, figures, weights, later = found[name]
        wanted_losses, wanted_norms, wanted_figures, wanted_weights, _ = single[name]
        assert np.abs(np.subtract(losses, wanted_losses)).max() <= (FORWARD[torch.bfloat16] if half else LOSS), name
        assert norms == pytest.approx(wanted_norms, rel=2e-2 if half else 1e-5), name
        assert min(norms) > 0.5, f"{name}: nothing was clipped"
        assert figures == pytest.approx(wanted_figures, rel=0.1 if half else 1e-3, abs=1e-3 if half else 1e-6), name
        assert any("query_key_value" in figure for figure in figures), name
        for key, values in weights.items():
            apart = np.abs(values - wanted_weights[key]).max()
            assert apart <= (FORWARD[torch.bfloat16] if half else TRAJECTORY), f"{name}: {key} {apart}"
    some = {name: RUNS[name] for name in RESUMED}
    resumed, *_ = run_distributed(4, _resume, some, str(tmp_path / "four"), tmp_path=tmp_path)
    for name in RESUMED:
        _assert_same_weights(resumed[name][0], found[name][3], name)
        assert resumed[name][1] == found[name][4], f"{name}: the resumed run goes on otherwise"
    for source, ranks, expected in (("four", 1, found), ("four", 2, found), ("one", 4, single)):
        loaded, *_ = run_distributed(ranks, _load, RUNS, str(tmp_path / source), tmp_path=tmp_path)
        for name in RUNS:
            _assert_same_weights(loaded[name], expected[name][3], f"{name} of {source} at {ranks}")
