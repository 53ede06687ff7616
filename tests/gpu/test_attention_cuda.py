"""The chunked kernel, soft caps and the choice of a kernel on CUDA, against fp64. Not run yet by this project.

NEOX_TEST_DEVICE=cuda .venv/bin/python -m pytest -m gpu tests/gpu
"""

from dataclasses import replace

import pytest
import torch

from megatron.geometry import HeadGeometry
from megatron.model.attention.core import AttentionRequest, chunked, eager, flash, flash_package, select_kernel
from tests.helpers.attention_reference import core_reference
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, BATCH = 6, 2, 2
WIDTHS = (8, 24, 30, 64, 128, 256, 320)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks in few tokens, and no explicit scores in their place."""
    monkeypatch.setattr(chunked, "BLOCK", {"cpu": 16, "cuda": 16})
    monkeypatch.setattr(chunked, "EXPLICIT_KEYS", {"cpu": 0, "cuda": 0})


def _qkv(width, dtype, queries=40, keys=40):
    generator = torch.Generator().manual_seed(width)
    shapes = [(queries, BATCH, HEADS, width), (keys, BATCH, KV_HEADS, width), (keys, BATCH, KV_HEADS, width)]
    return [torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in shapes]


def _compare(attend, reference, tensors, what, **options):
    """reference takes fp64 tensors on the CPU."""
    wide = [x.detach().double().cpu().requires_grad_() for x in tensors]
    for x in tensors:
        x.grad = None
    ours, wanted = attend(*tensors, **options), reference(*wide)
    assert_close(ours.cpu(), wanted, FORWARD, what)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(ours.dtype)
    ours.backward(upstream.cuda())
    wanted.backward(upstream.double())
    for name, x, expected in zip("qkv", tensors, wide, strict=True):
        assert_close(x.grad.cpu(), expected.grad, GRADIENT, f"gradient of {name}, {what}")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_chunked(width, dtype, small_blocks):
    scale = width**-0.5
    for queries, window in ((40, None), (40, 7), (24, None), (24, 17)):
        _compare(
            chunked.attend,
            lambda *x, o=40 - queries, w=window: core_reference(*x, scale, o, w),
            _qkv(width, dtype, queries),
            f"head_dim {width}, {queries} queries, window {window}",
            scale=scale,
            causal_offset=40 - queries,
            window=window,
        )


def _compare_capped(attend, width, dtype):
    """With eager in fp64, whose cap tests/unit/test_kernel_choice.py compares with Hugging Face's."""
    options = dict(scale=width**-0.5, causal_offset=0, softcap=0.8)
    _compare(attend, lambda *x: eager.attend(*x, **options), _qkv(width, dtype), f"head_dim {width}", **options)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_soft_cap_of_chunked(width, dtype, small_blocks):
    _compare_capped(chunked.attend, width, dtype)


@pytest.mark.parametrize("width", (30, 64, 256))
def test_soft_cap_of_the_flash_attn_package(width):
    if not flash_package.is_usable("cuda", torch.bfloat16):
        pytest.skip("the flash-attn package (2.6 or later) is not installed")
    _compare_capped(flash.attend, width, torch.bfloat16)


def test_real_block_sizes():
    """1100 tokens: three blocks, the last one short; scores in the thousands."""
    q, k, v = _qkv(64, torch.bfloat16, 1100, 1100)
    options = dict(scale=10.0, causal_offset=0)
    with torch.no_grad():
        ours = chunked.attend(q, k, v, **options)
        wanted = eager.attend(q.double(), k.double(), v.double(), **options)
    assert_close(ours, wanted, FORWARD)


def test_dropout_is_the_same_in_both_passes(small_blocks):
    q, k, v = (x[:, :1].detach().requires_grad_() for x in _qkv(4, torch.float64))

    def loss(values):
        torch.manual_seed(5)
        options = dict(scale=0.4, causal_offset=0, dropout_p=0.3, training=True)
        return chunked.attend(q, k, values, **options).square().sum()

    loss(v).backward()
    direction = torch.randn_like(v)
    with torch.no_grad():
        slope = (loss(v + 1e-5 * direction) - loss(v - 1e-5 * direction)) / 2e-5
    assert abs(slope - (v.grad * direction).sum()) < 1e-5 * slope.abs().clamp(min=1)


def test_auto_takes_flash_and_chunked_where_flash_cannot(monkeypatch):
    monkeypatch.setattr(flash_package, "is_usable", lambda *_: False)
    request = AttentionRequest(HeadGeometry(64, 2, 2, 64), torch.bfloat16, torch.device("cuda"))
    for changes, kernel in (({}, flash), (dict(window=8), chunked), (dict(dtype=torch.float32), chunked)):
        assert select_kernel("auto", replace(request, **changes)) is kernel
