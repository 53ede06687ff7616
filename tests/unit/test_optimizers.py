"""Each optimizer against its published formula, written out in fp64."""

from types import SimpleNamespace

import pytest
import torch

from megatron.errors import ConfigError
from megatron.training.optimizers import get_optimizer

STEPS = 4
DECAY = 0.1


def arguments(kind, weight_decay=DECAY, **params):
    return SimpleNamespace(
        optimizer_type=kind,
        optimizer={"type": kind, "params": params},
        weight_decay=weight_decay,
    )


def trajectory(kind, weight_decay=DECAY, dtype=torch.float32, **params):
    """Weights after STEPS steps on fixed gradients: a decayed matrix and an undecayed vector."""
    start, gradients = problem()
    weights = [torch.nn.Parameter(w.to(dtype)) for w in start]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "weight_decay": 0.0}]
    optimizer = get_optimizer(arguments(kind, weight_decay, **params), groups)
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.to(dtype)
        optimizer.step()
    return [weight.detach().double() for weight in weights]


def problem():
    generator = torch.Generator().manual_seed(5)
    shapes = [(3, 5), (4,)]
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    gradients = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(STEPS)]
    return start, gradients


def expected(update, weight_decay=DECAY):
    """Apply update(w, g, state, decay) -> w to both tensors."""
    start, gradients = problem()
    weights, states = list(start), [{}, {}]
    for step in gradients:
        for index, decay in enumerate((weight_decay, 0.0)):
            weights[index] = update(weights[index], step[index], states[index], decay)
    return weights


def assert_same(actual, wanted, atol=2e-6):
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, atol=atol, rtol=0)


def adamw(w, g, state, decay, lr=0.01, b1=0.9, b2=0.95, eps=1e-8):
    """Loshchilov and Hutter 2019, algorithm 2."""
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
    m, v = state["m"] / (1 - b1**t), state["v"] / (1 - b2**t)
    return w - lr * decay * w - lr * m / (v.sqrt() + eps)


@pytest.mark.parametrize("kind", ["adam", "Adam", "cpu_torch_adam"])
def test_adam_is_adamw(kind):
    assert_same(trajectory(kind, lr=0.01, betas=[0.9, 0.95], eps=1e-8), expected(adamw))


def test_adam_w_mode_false_is_l2():
    def l2(w, g, state, decay):
        return adamw(w, g + decay * w, state, 0.0)

    assert_same(trajectory("adam", lr=0.01, betas=[0.9, 0.95], eps=1e-8, adam_w_mode=False), expected(l2))


def test_sgd():
    def sgd(w, g, state, decay):
        state["b"] = 0.9 * state["b"] + g + decay * w if "b" in state else g + decay * w
        return w - 0.01 * state["b"]

    assert_same(trajectory("sgd", lr=0.01, momentum=0.9), expected(sgd))


def test_lion():
    def lion(w, g, state, decay):
        m = state.get("m", torch.zeros_like(g))
        update = torch.sign(0.9 * m + 0.1 * g)
        state["m"] = 0.99 * m + 0.01 * g
        return w - 0.01 * (update + decay * w)

    assert_same(trajectory("lion", lr=0.01), expected(lion))


def test_madgrad():
    def madgrad(w, g, state, decay):
        k = state["k"] = state.get("k", -1) + 1
        x0 = state.setdefault("x0", w)
        scale = 0.01 * (k + 1) ** 0.5
        state["s"] = state.get("s", 0.0) + scale * g
        state["v"] = state.get("v", 0.0) + scale * g * g
        z = x0 - state["s"] / (state["v"] ** (1 / 3) + 1e-6)
        return 0.9 * w * (1 - 0.01 * decay) + 0.1 * z

    assert_same(trajectory("madgrad_wd", lr=0.01), expected(madgrad))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sm3_matrix_by_loops(momentum):
    """SM3-II with one cover set per row and per column, entry by entry."""
    start, gradients = problem()
    w = start[0].clone()
    rows, columns = torch.zeros(3, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    average = torch.zeros_like(w)
    for step in gradients:
        g = step[0]
        nu = torch.zeros_like(w)
        for i in range(3):
            for j in range(5):
                nu[i, j] = min(rows[i], columns[j]) + g[i, j] ** 2
        rows, columns = nu.max(dim=1).values, nu.max(dim=0).values
        update = g / nu.sqrt()
        average = momentum * average + (1 - momentum) * update
        w = w - 0.1 * (average if momentum else update)
    assert_same([trajectory("sm3", lr=0.1, momentum=momentum)[0]], [w])


def test_empty_group_is_dropped():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = get_optimizer(arguments("adam", lr=0.1), [{"params": [weight]}, {"params": [], "weight_decay": 0.0}])
    assert len(optimizer.param_groups) == 1


def test_unknown_type_and_parameters():
    weight = [{"params": [torch.nn.Parameter(torch.zeros(2))]}]
    with pytest.raises(ConfigError, match="adagrad"):
        get_optimizer(arguments("adagrad"), weight)
    with pytest.raises(ConfigError, match="optimizer.params.nesterow=1"):
        get_optimizer(arguments("sgd", lr=0.1, nesterow=1), weight)
    with pytest.raises(ConfigError, match="betas"):
        get_optimizer(arguments("adam", lr=0.1, betas=[2.0, 0.9]), weight)
