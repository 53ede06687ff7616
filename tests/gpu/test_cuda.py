"""The CUDA paths against the CPU and the fp64 reference. Not run yet by this project: see README, "What has been run".

NEOX_TEST_DEVICE=cuda .venv/bin/python -m pytest -m gpu tests/gpu
"""

import pytest
import torch

from megatron.costs import kv_cache_bytes_per_token
from megatron.initialize import initialize_megatron
from megatron.model.attention.core import eager, flash, flash_package
from megatron.model.gpt2_model import build_model
from megatron.training.engine import setup_model_and_optimizer
from tests.helpers.attention_reference import core_reference
from tests.helpers.configs import tiny_args
from tests.helpers.engines import train
from tests.helpers.geometries import ALL, GQA_TP4, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, TOKENS, BATCH = 6, 2, 40, 2
WIDTHS = (16, 24, 30, 64, 80, 128, 192, 256)
"""24 and 80 are no multiple of 16; 30 is padded to 32."""


def _qkv(width, tokens=TOKENS):
    generator = torch.Generator().manual_seed(width)
    shapes = [(TOKENS, BATCH, HEADS, width), (tokens, BATCH, KV_HEADS, width), (tokens, BATCH, KV_HEADS, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _compare(attend, width, dtype, **options):
    q, k, v = (x.to("cuda", dtype).requires_grad_() for x in _qkv(width))
    wide = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    ours = attend(q, k, v, scale=width**-0.5, causal_offset=0, **options)
    wanted = core_reference(*wide, width**-0.5, window=options.get("window"))
    assert_close(ours.cpu(), wanted, FORWARD, f"head_dim {width}")
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours.backward(upstream.to(ours.device))
    wanted.backward(upstream.double())
    for name, x, reference in zip("qkv", (q, k, v), wide, strict=True):
        assert_close(x.grad.cpu(), reference.grad, GRADIENT, f"gradient of {name}, head_dim {width}")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_torch_flash(width, dtype, monkeypatch):
    monkeypatch.setattr(flash_package, "is_usable", lambda *_: False)
    _compare(flash.attend, width, dtype)


@pytest.mark.skipif(
    not flash_package.is_usable("cuda", torch.bfloat16), reason="no flash-attn package with its CUDA library"
)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("window", (None, 7))
def test_flash_attn_package(width, window):
    _compare(flash.attend, width, torch.bfloat16, window=window)


@pytest.mark.parametrize("width", (*WIDTHS, 320))
def test_eager(width):
    _compare(eager.attend, width, torch.float32)


@pytest.mark.parametrize("name", ALL)
def test_a_model_computes_on_cuda_what_it_computes_on_the_cpu(name):
    args = tiny_args(**ALL[name], attention_softmax_in_fp32=True)
    model = build_model(args)
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, -1)
    with torch.no_grad():
        on_gpu = model((tokens.cuda(), positions.cuda())).cpu()
        on_cpu = model.cpu()((tokens, positions))
    assert_close(on_gpu, on_cpu, FORWARD, name)


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("kind", ("global", "flash"))
def test_bf16_training_learns(stage, kind):
    settings = dict(WIDE_NON_DIVISIBLE, precision="bfloat16", zero_optimization={"stage": stage})
    args = tiny_args(**settings, attention_config=[[[kind], "all"]], distributed_backend="nccl")
    initialize_megatron(args)
    losses = train(args, setup_model_and_optimizer(args), 1)
    args = tiny_args(**settings, attention_config=[[[kind], "all"]], distributed_backend="nccl", train_iters=60)
    engine = setup_model_and_optimizer(args)
    for _ in range(30):
        losses += train(args, engine, 1)  # the same batch again
    assert losses[-1] < losses[0] - 0.5, losses


def test_cached_decoding_on_cuda():
    from megatron.text_generation import stream_tokens
    from tests.unit.test_generation_model import generation_args

    args = generation_args(**GQA_TP4, precision="bfloat16", attention_config=[[["flash"], "all"]])
    model = build_model(args).cuda()
    prompts = [[17, 5, 99], [3, 3, 64, 21, 8, 110, 2]]
    last = [
        list(stream_tokens(args, model, prompts, eos_token_id=-1, recompute=recompute))[-1].tokens.cpu()
        for recompute in (False, True)
    ]
    assert (last[0] == last[1]).float().mean() > 0.9, "bf16 may break a tie differently, not more"
    assert kv_cache_bytes_per_token(args) > 0
