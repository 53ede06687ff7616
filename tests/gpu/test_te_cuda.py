"""Transformer Engine's layers on a GPU, with its own kernels, against our layers; FP8 where the device has it.

NEOX_TEST_DEVICE=cuda .venv/bin/python -m pytest -m gpu tests/gpu

Needs Transformer Engine itself (requirements/requirements-te.txt), not the Python sources that the CPU tests use.
"""

import pytest
import torch

from megatron.errors import BackendError
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model, cross_entropy
from tests.helpers.configs import tiny_args
from tests.helpers.model_runs import batch, disturb
from tests.helpers.te_layers import copy_from_native
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

pytestmark = pytest.mark.gpu

WIDTHS = dict(hidden_size=96, num_attention_heads=6, num_kv_heads=2, head_dim=48, ffn_hidden_size=64)
"""Multiples of 16, as FP8 needs; the query width is 288."""
COMMON = dict(WIDTHS, seq_length=16, max_position_embeddings=16, precision="bfloat16", use_cpu_initialization=True)
LAYERS = dict(te_columnparallel=True, te_rowparallel=True)
MODELS = {
    "linear layers": dict(LAYERS, norm="rmsnorm", activation="swiglu"),
    "norms": dict(norm="te_layernorm"),
    "mlp": dict(te_layernorm_mlp=True, norm="te_rmsnorm", activation="swiglu", zero_centered_gamma=True),
    "attention": dict(te_mha=True, norm="rmsnorm"),
    "all of it": dict(LAYERS, te_layernorm_mlp=True, te_mha=True, norm="te_layernorm", activation="geglu_tanh"),
}


@pytest.fixture(autouse=True)
def transformer_engine():
    try:
        import megatron.model.transformer_engine.api  # noqa: F401
    except BackendError as error:
        pytest.skip(str(error))


def _without_te(settings):
    native = {key: value for key, value in settings.items() if not key.startswith("te_")}
    return {**native, "norm": native["norm"].removeprefix("te_")}


def _model(settings):
    args = tiny_args(**COMMON, **settings)
    initialize_megatron(args)
    return args, build_model(args).to("cuda", torch.bfloat16)


def _loss(args, model):
    (tokens, positions), targets = batch()
    logits = model((tokens.cuda(), positions.cuda()))
    return cross_entropy(args)(logits, tuple(target.cuda() for target in targets))


@pytest.mark.parametrize("name", MODELS)
def test_models_with_and_without_are_one_function(name):
    args, model = _model(MODELS[name])
    native_args, native = _model(_without_te(MODELS[name]))
    disturb(native, native_args)
    pairs = copy_from_native(model, native, args)
    loss, wanted = _loss(args, model), _loss(native_args, native)
    assert abs(loss.item() - wanted.item()) < FORWARD[torch.bfloat16]
    loss.backward()
    wanted.backward()
    for key, parameter, theirs, translate in pairs:
        if theirs.grad is not None:
            assert_close(parameter.grad, translate(theirs.grad), GRADIENT, key)


def test_fp8_learns_as_bfloat16_does():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with FP8, of compute capability 8.9 or more")
    losses = []
    for more in (dict(te_fp8_mha=True), dict()):
        args, model = _model({**MODELS["all of it"], **more})
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(20):
            optimizer.zero_grad()
            loss = _loss(args, model)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    first = _loss(*_model(MODELS["all of it"])).item()
    assert losses[1] < 0.8 * first
    assert abs(losses[0] - losses[1]) < 0.1 * first
    assert losses[0] != losses[1]
