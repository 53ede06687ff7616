"""The blockwise kernel against fp64 statements of attention, in values, gradients, memory and dropout.

Blocks are made small, so that few tokens are many blocks; `own` takes the kernel's own forward pass, `torch` the one
that it borrows on the CPU, `shifted` the products in bfloat16 wherever they are possible.
"""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron import mpu
from megatron.errors import BackendError
from megatron.model.attention.core import chunked, cpu_flash, eager, shifted
from megatron.model.attention.core.blocks import BlockProducts
from megatron.model.attention.core.spec import Spec
from tests.helpers.attention_reference import core_reference
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

SIZE = 8
HEADS = ((6, 2, 2), (6, 6, 2), (5, 1, 1), (3, 3, 3))
"""Query, key and value heads; (6, 6, 2) is the joint norm of queries and keys."""


@pytest.fixture(params=("own", "torch", "shifted"))
def route(request, monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK", {"cpu": SIZE, "cuda": SIZE})
    monkeypatch.setattr(shifted, "_has_amx", lambda: request.param != "shifted")
    monkeypatch.setattr(chunked, "_explicit_is_faster", lambda *a: False)
    monkeypatch.setattr(cpu_flash, "MASKED_ROWS", SIZE)
    if request.param == "own":
        monkeypatch.setattr(cpu_flash, "can", lambda *a: False)
    return request.param


def _tensors(queries, keys, heads, width, dtype=torch.float64, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n, key_heads, value_heads = heads
    shapes = ((queries, batch, n, width), (keys, batch, key_heads, width), (keys, batch, value_heads, width))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made]


def _capped_reference(q, k, v, scale, offset=0, window=None, cap=None):
    """fp64; scale, cap, mask, softmax, in Gemma 2's order. Finite at any size of the scores."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    back = torch.arange(q.shape[0])[:, None] + offset - torch.arange(k.shape[0])
    hidden = (back < 0) | (back > (window if window is not None else len(back) + offset))
    return torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def _compare(reference, tensors, what="", **options):
    """Output and the three gradients, at the tolerance of the tensors' dtype."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    for x in tensors:
        x.grad = None
    offset = tensors[1].shape[0] - tensors[0].shape[0]
    output, wanted = chunked.attend(*tensors, causal_offset=offset, **options), reference(*wide)
    pull = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(output.dtype)
    output.backward(pull)
    wanted.backward(pull.double())
    assert output.dtype == tensors[0].dtype
    assert_close(output, wanted, FORWARD, f"output {what}")
    for name, x, expected in zip("qkv", tensors, wide, strict=True):
        assert_close(x.grad, expected.grad, GRADIENT, f"gradient of {name} {what}")


@pytest.mark.parametrize("queries, keys", [(27, 27), (24, 24), (9, 8 + 9), (5, 30), (1, 21), (17, 32)])
def test_blocks_windows_and_caches_equal_the_fp64_einsum(route, queries, keys):
    offset = keys - queries
    for heads in HEADS:
        for window in (None, 1, SIZE - 1, SIZE, SIZE + 1, keys - 2, 99):
            tensors = _tensors(queries, keys, heads, 6)
            _compare(
                lambda *x, window=window: core_reference(*x, 0.3, offset, window),
                tensors,
                f"heads {heads} window {window}",
                scale=0.3,
                window=window,
            )


@pytest.mark.parametrize("width", (5, 8, 30, 64, 130, 256, 320))
def test_any_head_dim(route, width):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = _tensors(19, 19, (4, 2, 2), width, dtype)
        _compare(lambda *x: core_reference(*x, width**-0.5), tensors, f"{dtype}", scale=width**-0.5)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_soft_cap_bounds_scaled_scores_before_the_mask(route, dtype):
    for window, heads in ((None, (6, 2, 2)), (5, (3, 3, 3))):
        tensors = _tensors(21, 26, heads, 12, dtype)
        options = dict(window=window, cap=1.5)
        _compare(
            lambda *x, o=options: _capped_reference(*x, 0.4, 5, **o), tensors, scale=0.4, window=window, softcap=1.5
        )


def test_gradients_equal_finite_differences_with_everything_on(route):
    tensors = _tensors(7, 11, (4, 2, 2), 3, batch=1)

    def attend(*x):
        torch.manual_seed(4)  # the same masks each time
        options = dict(window=6, softcap=1.2, dropout_p=0.3, training=True)
        return chunked.attend(*x, scale=0.7, causal_offset=4, **options)

    assert torch.autograd.gradcheck(attend, tensors, atol=1e-7)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_scores_of_ten_thousand_neither_overflow_nor_lose_their_differences(route, dtype):
    """Whole numbers, so that scores are exact in fp32, and neighbours differ by less than bf16 would resolve."""
    generator = torch.Generator().manual_seed(2)
    q = torch.full((20, 1, 2, 16), 8.0, dtype=torch.float64)
    k = torch.full((20, 1, 2, 16), 80.0, dtype=torch.float64)
    k[..., 0] += torch.randint(-1, 2, k.shape[:-1], generator=generator)
    tensors = [x.to(dtype).requires_grad_() for x in (q, k, torch.randn(k.shape, generator=generator))]
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * 0.125
    assert scores.min() >= 1.2e3 and scores.max() - scores.min() == 2
    for scale in (0.125, 1.0):  # scores around 1280 and 10240
        wide = [x.detach().double() for x in tensors]
        wanted = _capped_reference(*wide, scale)
        assert_close(chunked.attend(*tensors, scale=scale, causal_offset=0), wanted, FORWARD, f"scale {scale}")
    _check_sharp_gradients(tensors)


def _check_sharp_gradients(tensors):
    """Scores rounded to bf16 are 4 off, so weights 50 times too large, and gradients of q in the tens."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    chunked.attend(*tensors, scale=0.125, causal_offset=0).sum().backward()
    _capped_reference(*wide, 0.125).sum().backward()
    assert_close(tensors[2].grad, wide[2].grad, GRADIENT, "gradient of v")
    allowed = 0.02 if tensors[0].dtype == torch.float32 else 80 * 2**-7
    for x, expected in zip(tensors[:2], wide[:2], strict=True):
        assert (x.grad.double() - expected.grad).abs().max() < allowed


ROWS = {"random": (1, 1, 0), "peaked": (3, 2, 0), "flat": (0.02, 0.02, 0), "first token": (1, 1, 6)}
"""Sizes of the queries and of the keys, and a score that all give to the first token."""


@pytest.mark.parametrize("kind", ROWS)
def test_shifted_products_in_bf16_come_as_near_to_fp64_as_scores_in_fp32(monkeypatch, kind):
    """Relative errors over all elements, which come from weights and gradients rounded to bf16 either way. Shifted by
    the log-sum-exp instead of the highest score, they are 2.4 times as large for random rows."""
    query_size, key_size, first = ROWS[kind]
    q, k, v = _tensors(300, 300, (4, 2, 2), 128)
    with torch.no_grad():
        q, k = q * query_size, k * key_size
        if first:
            q[..., 0], k[..., 0], k[0, ..., 0] = 11.0, 0.0, first * 128**0.5 / 11
    tensors = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    pull = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    _capped_reference(*wide, 128**-0.5).backward(pull.double())

    def errors(of_shifted):
        monkeypatch.setattr(shifted, "_has_amx", lambda: not of_shifted)
        for x in tensors:
            x.grad = None
        chunked.attend(*tensors, scale=128**-0.5, causal_offset=0).backward(pull)
        pairs = zip(tensors, wide, strict=True)
        return torch.stack([(x.grad.double() - w.grad).norm() / w.grad.norm() for x, w in pairs])

    ratio = errors(True) / errors(False)
    assert (0.5 < ratio).all() and (ratio < 1.5).all() and (ratio != 1).all(), ratio


def test_real_block_sizes():
    """As configured, over the edges between one block and several, between explicit and blockwise."""
    for tokens, width, dtype in ((256, 24, torch.float32), (257, 24, torch.float32), (300, 128, torch.float32)):
        tensors = _tensors(tokens, tokens, (2, 1, 1), width, dtype, batch=1)
        for window in (None, 130):
            _compare(
                lambda *x, w=window: _capped_reference(*x, 0.1, window=w),
                tensors,
                str(tokens),
                scale=0.1,
                window=window,
            )
    for tokens in (256, 300):
        tensors = _tensors(tokens, tokens, (2, 1, 1), 24, torch.bfloat16, batch=1)
        _compare(lambda *x: _capped_reference(*x, 0.2, cap=5.0), tensors, "bfloat16", scale=0.2, softcap=5.0)


def test_products_with_an_fp32_result_as_on_cuda(monkeypatch):
    """torch has these for half precision on CUDA only: shapes and dtypes by its rules, values by a stand-in."""
    monkeypatch.setattr(BlockProducts, "_on_cuda", property(lambda self: True, lambda self, value: None), raising=False)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k, v = (torch.empty(300, 2, heads, 64, dtype=dtype, device="meta") for heads in (6, 2, 2))
        for spec in (Spec(0.1, 0), Spec(0.1, 0, window=200, softcap=3.0)):
            output, log_sums, _ = chunked._forward(q, k, v, spec)
            gradients = chunked._backward(q, k, v, output, log_sums, output, spec)
            assert (output.dtype, log_sums.dtype) == (dtype, torch.float32)
            assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, dtype) for x in (q, k, v)]

    def bmm(a, b, out_dtype=None, out=None):
        if out_dtype is None:
            return plain(a, b) if out is None else plain(a, b, out=out)
        assert a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16) and out_dtype == torch.float32
        return plain(a.float(), b.float())

    plain = torch.bmm
    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(chunked, "BLOCK", {"cpu": SIZE, "cuda": SIZE})
    monkeypatch.setattr(chunked, "_explicit_is_faster", lambda *a: False)
    monkeypatch.setattr(cpu_flash, "can", lambda *a: False)
    tensors = _tensors(21, 26, (6, 2, 2), 12, torch.bfloat16)
    _compare(lambda *x: _capped_reference(*x, 0.4, 5, cap=1.5), tensors, scale=0.4, softcap=1.5)


# Memory and work


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return result


def _memory(attend, tokens, **options):
    """Elements saved for the backward pass, and of the largest tensor in the forward and in the backward pass."""
    tensors = _tensors(tokens, tokens, (2, 1, 1), 4, batch=1)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x)
    with hooks, _LargestTensor() as forward:
        output = attend(*tensors, scale=0.5, causal_offset=0, training=True, **options)
    with _LargestTensor() as backward:
        output.sum().backward()
    return torch.tensor([sum(saved), forward.largest, backward.largest])


@pytest.mark.parametrize("options", ({}, dict(window=20), dict(softcap=2.0), dict(dropout_p=0.1)))
def test_memory_grows_with_the_length_and_not_with_its_square(route, options):
    growth = _memory(chunked.attend, 256, **options) / _memory(chunked.attend, 128, **options)
    assert growth.max() <= 2.0, growth
    explicit = _memory(eager.attend, 256, **options) / _memory(eager.attend, 128, **options)
    assert explicit[1:].min() > 3.9, "the measure sees s x t"


def test_blocks_that_no_query_sees_are_not_computed(route, monkeypatch):
    computed = []
    scores = chunked._scores
    monkeypatch.setattr(chunked, "_scores", lambda *a, **k: computed.append((a[2], a[3])) or scores(*a, **k))
    tensors = _tensors(10 * SIZE, 10 * SIZE, (1, 1, 1), 128)
    for window, pairs in ((None, 30), (SIZE, 10)):  # of SIZE queries and twice as many keys
        computed.clear()
        chunked.attend(*tensors, scale=1.0, causal_offset=0, window=window).sum().backward()
        assert len(set(computed)) == pairs and len(computed) == pairs * (2 if route == "own" else 1)


# Modes


def test_no_grad_and_activation_checkpointing_change_no_bit(route):
    tensors = _tensors(20, 20, (4, 2, 2), 8, torch.float32)

    def attend(*x):
        return chunked.attend(*x, scale=0.3, causal_offset=0, dropout_p=0.2, training=True)

    def run(function):
        torch.manual_seed(3)
        for x in tensors:
            x.grad = None
        output = function(*tensors)
        output.square().sum().backward()
        return [output, *(x.grad for x in tensors)]

    plain = run(attend)
    for reentrant in (True, False):
        again = run(lambda *x, r=reentrant: checkpoint(attend, *x, use_reentrant=r))
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    with torch.no_grad():
        torch.manual_seed(3)
        silent = attend(*tensors)
    assert torch.equal(silent, plain[0]) and not silent.requires_grad


def test_a_second_derivative_is_refused(route):
    tensors = _tensors(20, 20, (2, 2, 2), 8)
    (first,) = torch.autograd.grad(
        chunked.attend(*tensors, scale=0.3, causal_offset=0).square().sum(), tensors[:1], create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_score_bias_is_refused():
    with pytest.raises(BackendError, match="attention_config=global"):
        chunked.attend(*_tensors(3, 3, (1, 1, 1), 8), scale=1.0, causal_offset=0, bias=torch.zeros(1, 3, 3))


# Dropout


def _weights(p, training=True, tokens=40):
    """The weights after dropout [tokens, 2, tokens], by values that are unit vectors."""
    q, k, _ = _tensors(tokens, tokens, (2, 2, 2), tokens, batch=1)
    v = torch.eye(tokens, dtype=torch.float64)[:, None, None].expand(-1, 1, 2, -1)
    return chunked.attend(q, k, v, scale=0.2, causal_offset=0, dropout_p=p, training=training)[:, 0]


def test_dropout_drops_single_weights_and_scales_the_others(route):
    whole = _weights(0.25, training=False)
    torch.manual_seed(0)
    dropped = _weights(0.25)
    visible = whole > 0
    kept = dropped[visible] / whole[visible]
    assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / 0.75), FORWARD)
    assert abs((kept == 0).double().mean() - 0.25) < 0.03  # 1640 weights: three standard deviations
    assert not torch.equal(_weights(0.25), dropped), "each call draws anew"
    # Blocks, heads and rows have masks of their own.
    zeros = (dropped == 0) & visible
    first, second = zeros[SIZE : 2 * SIZE, :, :SIZE], zeros[2 * SIZE : 3 * SIZE, :, :SIZE]
    assert not torch.equal(first, second) and not torch.equal(zeros[:, 0], zeros[:, 1])


def test_dropout_follows_the_random_state_of_the_rank(route, monkeypatch):
    class Tracker:
        rank = 0

        @contextlib.contextmanager
        def fork(self):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(100 + self.rank)
                yield

    tracker = Tracker()
    monkeypatch.setattr(mpu, "get_cuda_rng_tracker", lambda: tracker)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again = _weights(0.5), _weights(0.5)
    tracker.rank = 1
    other = _weights(0.5)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before), "the state that all ranks share is not used"
