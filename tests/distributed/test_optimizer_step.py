"""One optimizer step of the engine without ZeRO, against AdamW, SGD and Lion written out in fp64."""

import math
import time

import pytest
import torch

from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.engines import build_engine, train

STEPS, RATE, DECAY, CLIP = 3, 1e-3, 0.1, 0.25
BETAS, EPS = (0.9, 0.95), 1e-8
PARAMS = {
    "adam": dict(lr=RATE, betas=BETAS, eps=EPS),
    "sgd": dict(lr=RATE, momentum=0.9),
    "lion": dict(lr=RATE, betas=BETAS),
}


def arguments(precision, kind, **settings):
    return tiny_args(
        **dict(
            precision=precision,
            optimizer={"type": kind, "params": PARAMS[kind]},
            gradient_clipping=CLIP,
            weight_decay=DECAY,
            lr_decay_style="constant",
            warmup=0.0,
            train_iters=10,
            **settings,
        )
    )


def adam(weight, gradient, state, decay, step):
    first, second = state.setdefault("first", gradient * 0), state.setdefault("second", gradient * 0)
    first.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    scaled = first / (1 - BETAS[0] ** step) / ((second / (1 - BETAS[1] ** step)).sqrt() + EPS)
    weight -= RATE * (decay * weight + scaled)


def sgd(weight, gradient, state, decay, step):
    momentum = state.setdefault("momentum", gradient * 0)
    momentum.mul_(0.9).add_(gradient + decay * weight)
    weight -= RATE * momentum


def lion(weight, gradient, state, decay, step):
    momentum = state.setdefault("momentum", gradient * 0)
    weight -= RATE * (decay * weight + (BETAS[0] * momentum + (1 - BETAS[0]) * gradient).sign())
    momentum.mul_(BETAS[1]).add_(gradient, alpha=1 - BETAS[1])


FORMULAS = {"adam": adam, "sgd": sgd, "lion": lion}


class Reference:
    """The same steps in fp64, from the gradients that the backward pass leaves."""

    def __init__(self, engine, formula):
        self._engine, self._formula, self._steps = engine, formula, 0
        self.parameters = dict(engine.module.named_parameters())
        self.weights = {name: p.detach().double() for name, p in self.parameters.items()}
        self._states = {name: {} for name in self.weights}
        self.norms = []
        self._update, engine._take_model_step = engine._take_model_step, self._before_update

    def _before_update(self, *args, **kwargs):
        gradients = {name: p.grad.double() for name, p in self.parameters.items()}
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        self.norms.append(norm)
        self._steps += 1
        factor = min(1.0, CLIP / (norm + 1e-6))
        for name, weight in self.weights.items():
            decay = DECAY if weight.dim() > 1 else 0.0
            self._formula(weight, gradients[name] * factor, self._states[name], decay, self._steps)
        return self._update(*args, **kwargs)


def masters_of(engine):
    """Name -> the weight that the optimizer steps."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_groups"):
        return dict(engine.module.named_parameters())
    groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
    return {names[id(p)]: m for fp32, fp16 in groups for m, p in zip(fp32, fp16, strict=True)}


def compare(rank, world_size, precision, kind, piece):
    from megatron.training import master_weights, train_step
    from tests.helpers.engines import _batches

    master_weights._PIECE = piece
    args = arguments(precision, kind)
    engine = build_engine(args)
    reference = Reference(engine, FORMULAS[kind])
    engine.train()
    norms = [train_step(args, engine, _batches(args, step))["grad_norm"] for step in range(STEPS)]
    assert norms == pytest.approx(reference.norms, rel=1e-6) and min(norms) > 2 * CLIP
    masters = masters_of(engine)
    for name, wanted in reference.weights.items():
        off = (masters[name].detach().double() - wanted).abs() > 2e-7 * max(1.0, wanted.abs().max())
        assert off.double().mean() <= (1e-3 if kind == "lion" else 0.0), name  # a sign of what cancels may be either
        assert torch.equal(reference.parameters[name], masters[name].to(args.params_dtype)), name
    return {name: master.detach().clone() for name, master in masters.items()}


def steps_as_written_out(rank, world_size):
    for precision in ("fp32", "bfloat16"):
        for kind in FORMULAS:
            whole = compare(rank, world_size, precision, kind, 1 << 30)
            pieces = compare(rank, world_size, precision, kind, 100)
            assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_a_step_is_that_of_the_formula_whole_or_in_pieces(tmp_path):
    run_distributed(1, steps_as_written_out, tmp_path=tmp_path)


def gradient_that_is_not_finite(rank, world_size):
    from megatron.training import train_step
    from tests.helpers.engines import _batches

    for precision in ("fp32", "bfloat16"):
        args = arguments(precision, "adam")
        engine = build_engine(args)
        train(args, engine, 1)
        before = {name: weight.detach().clone() for name, weight in masters_of(engine).items()}
        hook = next(engine.module.parameters()).register_hook(lambda gradient: gradient * float("nan"))
        metrics = train_step(args, engine, _batches(args, 1))
        hook.remove()
        assert metrics["skipped"] and metrics["grad_norm"] is None
        assert all(torch.equal(before[name], weight) for name, weight in masters_of(engine).items())
        metrics = train_step(args, engine, _batches(args, 2))
        assert not metrics["skipped"] and metrics["grad_norm"] > 0.0
        assert not any(torch.equal(before[name], weight) for name, weight in masters_of(engine).items())


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path):
    run_distributed(1, gradient_that_is_not_finite, tmp_path=tmp_path)


def one_replica(rank, world_size):
    """What the step allocates: no copy of all gradients for a sum over one replica, no fp32 gradient of everything."""
    from torch.profiler import ProfilerActivity, profile

    from megatron.training import master_weights

    master_weights._PIECE = 1
    for precision in ("fp32", "bfloat16"):
        args = arguments(precision, "adam")
        engine = build_engine(args)
        train(args, engine, 1)
        numbers = sum(parameter.numel() for parameter in engine.module.parameters())
        largest = max(parameter.numel() for parameter in engine.module.parameters())
        assert numbers > 3 * largest
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train(args, engine, 1)
        events = profiler.profiler.kineto_results.events()
        sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
        assert max(sizes) < args.params_dtype.itemsize * numbers, precision


def test_one_replica_needs_no_copies_of_all_gradients(tmp_path):
    run_distributed(1, one_replica, tmp_path=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_tensor_is_exact(dtype):
    """torch's own norm is off by 1e-4 here."""
    from megatron.training.gradients import global_norm

    tensors = [torch.full((numel,), 0.3, dtype=dtype) for numel in (1, 4095, 4097, (1 << 24) + 77)]
    wanted = math.sqrt(sum(t[0].double().item() ** 2 * t.numel() for t in tensors))
    assert global_norm(tensors, None).item() == pytest.approx(wanted, rel=1e-6)


def slow_data(rank, world_size):
    from megatron.training import train_step
    from tests.helpers.engines import _batches

    def slowly(args):
        for batch in _batches(args, 0):
            time.sleep(0.05)
            yield batch

    for pipe in (0, 1):
        args = arguments("fp32", "sgd", pipe_parallel_size=pipe, gradient_accumulation_steps=2)
        engine = build_engine(args)
        engine.train()
        started = time.perf_counter()
        waited = train_step(args, engine, slowly(args))["data_seconds"]
        assert 0.1 <= waited < time.perf_counter() - started, pipe


def test_a_step_says_how_long_it_waited_for_its_data(tmp_path):
    run_distributed(1, slow_data, tmp_path=tmp_path)


def test_the_memory_estimate_knows_the_size_of_a_piece():
    from megatron.costs import states
    from megatron.training import master_weights

    assert states._PIECE == master_weights._PIECE
