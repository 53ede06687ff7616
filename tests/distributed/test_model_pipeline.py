"""Pipeline stages, with and without tensor parallelism, train as the sequential model does."""

import deepspeed
import numpy as np
import torch

from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model, cross_entropy
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import batch, disturb, joined, named_parameters
from tests.helpers.tolerances import GRADIENT, TRAJECTORY

STEPS, MICRO_BATCHES, LEARNING_RATE = 3, 2, 0.5
SWIGLU = dict(activation="swiglu", norm="rmsnorm", ffn_hidden_size=48)
CASES = {
    "tied learned": dict(WIDE_NON_DIVISIBLE, no_weight_tying=False, pos_emb="learned"),
    "untied gated checkpointed": dict(GQA_TP4, **SWIGLU, checkpoint_activations=True, checkpoint_num_layers=2),
    "tied three layers": dict(WIDE_NON_DIVISIBLE, num_layers=3, no_weight_tying=False, gpt_j_residual=True),
}

BOTH = "tied gated sequence parallel"
"""Trained on two stages of two tensor-parallel ranks as well."""
CASES[BOTH] = dict(GQA_TP4, **SWIGLU, no_weight_tying=False, sequence_parallel=True)


def _args(settings, pp, tp):
    settings = dict(settings, gradient_accumulation_steps=MICRO_BATCHES, zero_optimization={"stage": 0})
    return tiny_args(**settings, pipe_parallel_size=pp, model_parallel_size=tp, global_num_gpus=max(pp, 1) * tp)


def _micro_batches():
    return (batch(number % MICRO_BATCHES) for number in range(STEPS * MICRO_BATCHES))


def _train_sequential(settings):
    """Plain torch: (losses, {name: weight after the steps})."""
    args = _args(settings, 0, 1)
    initialize_megatron(args)
    model = build_model(args)
    disturb(model, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, batches = [], _micro_batches()
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            inputs, targets = next(batches)
            loss = cross_entropy(args)(model(inputs), targets) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach().numpy().copy() for name, p in named_parameters(model)}


def _train_pipeline(settings, pp, tp):
    """DeepSpeed's engine: the same for this rank's stage, shares joined over the tensor-parallel ranks."""
    args = _args(settings, pp, tp)
    initialize_megatron(args)
    model = build_model(args)
    disturb(model, args)
    model._synchronize_tied_weights()
    config = {**args.deepspeed_config, "gradient_clipping": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batches = _micro_batches()
    losses = [engine.train_batch(batches).item() for _ in range(STEPS)]
    return losses, {name: joined(p, p.detach()).numpy().copy() for name, p in named_parameters(model)}


def _rank(rank, world_size, pp, tp, names):
    return {name: _train_pipeline(CASES[name], pp, tp) for name in names}


def _single(rank, world_size):
    sequential = {name: _train_sequential(settings) for name, settings in CASES.items()}
    return sequential, {name: _train_pipeline(settings, 1, 1) for name, settings in CASES.items()}


def _assert_same_training(name, wanted, stages):
    losses, weights = wanted
    seen = set()
    for stage_losses, stage_weights in stages:
        assert np.allclose(stage_losses, losses, rtol=0, atol=TRAJECTORY), f"{name}: {stage_losses} is not {losses}"
        for key, values in stage_weights.items():
            difference = np.abs(values - weights[key]).max()
            assert difference <= GRADIENT[torch.float32], f"{name}: {key} differs by {difference:.2g} after training"
        seen |= stage_weights.keys()
    assert seen == weights.keys(), f"{name}: {seen ^ weights.keys()}"


def test_pipeline_stages_train_as_the_sequential_model(tmp_path):
    ((sequential, one_stage),) = run_distributed(1, _single, tmp_path=tmp_path)
    two_stages = run_distributed(2, _rank, 2, 1, list(CASES), tmp_path=tmp_path)
    two_by_two = run_distributed(4, _rank, 2, 2, [BOTH], tmp_path=tmp_path)
    for name, wanted in sequential.items():
        assert wanted[0][0] - wanted[0][-1] > 0.05, f"{name}: nothing was learned, so nothing was compared"
        _assert_same_training(name, wanted, [one_stage[name]])
        _assert_same_training(name, wanted, [stage[name] for stage in two_stages])
    _assert_same_training(BOTH, sequential[BOTH], [rank[BOTH] for rank in two_by_two])
