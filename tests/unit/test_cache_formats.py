"""Cached numbers against the definitions of their formats, and attention over them against fp64 with derived bounds."""

import math

import numpy as np
import pytest
import torch

from megatron.model.attention import LayerKVCache
from megatron.model.attention.cache_formats import bytes_per_head, cache_format
from megatron.model.attention.core import KERNELS
from tests.helpers.attention_reference import core_reference
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MHA, MQA, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, assert_close

HEAD_DIMS = (5, 12, 24, 80, 256, 320)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = ("fp8_e4m3", "int8")


def e4m3_reference(x):
    """The nearest of all e4m3 numbers, listed from their definition: 1.mmm times 2^(e-7), below that steps of 2^-9."""
    codes = [(e, m) for e in range(16) for m in range(8) if (e, m) != (15, 7)]
    table = np.array([m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e, m in codes])
    magnitude = np.minimum(np.abs(x.double().numpy()), table[-1])
    above = np.searchsorted(table, magnitude)
    below = np.maximum(above - 1, 0)
    to_above, to_below = table[above] - magnitude, magnitude - table[below]
    nearest = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    return torch.from_numpy(np.copysign(table[nearest], x.double().numpy()))


def int8_reference(x):
    """Nearest step of amax/127 in each row, in fp32 as the format says."""
    rows = x.float().numpy()
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    steps = np.rint(np.divide(rows, scale, out=np.zeros_like(rows), where=scale != 0))
    assert np.abs(steps).max() <= 127
    return torch.from_numpy((steps * scale).astype(np.float64))


REFERENCES = {"fp8_e4m3": e4m3_reference, "int8": int8_reference}


def largest_error(name, x):
    """Half a step of the format at each number of x [..., d], in fp64."""
    x = x.double()
    if name == "int8":
        return (x.abs().amax(-1, keepdim=True) / 127 / 2).expand_as(x)
    exponent = x.abs().clamp(min=2.0**-6).log2().floor()  # below 2^-6 the steps stay as they are
    return 2.0 ** (exponent - 3) / 2


def numbers(head_dim, dtype=torch.float32, seed=0, spread=3.0):
    """[5, 2, 3, d] of magnitudes from 2^-14 to hundreds, with a row of zeros."""
    generator = torch.Generator().manual_seed(seed + head_dim)
    x = torch.randn(5, 2, 3, head_dim, generator=generator)
    x = x * torch.exp2(torch.randn(5, 2, 3, 1, generator=generator) * spread)
    x[2, 1, 0] = 0.0
    return x.to(dtype)


def stored(name, x):
    form = cache_format(name, x.dtype)
    return form.decode(form.encode(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_becomes_its_nearest(name, dtype):
    for head_dim in HEAD_DIMS:
        x = numbers(head_dim, dtype).clamp(-440, 440)
        got = stored(name, x)
        assert got.dtype == dtype
        expected = REFERENCES[name](x)
        # e4m3 is exact in every dtype; the steps of int8 are scaled in fp32 and rounded to the dtype.
        slack = 0.0 if name == "fp8_e4m3" else torch.finfo(dtype).eps
        assert ((got.double() - expected).abs() <= slack * expected.abs()).all(), head_dim
        off = (got.double() - x.double()).abs() - torch.finfo(dtype).eps * x.double().abs()
        assert (off <= largest_error(name, x)).all(), head_dim
        assert got[2, 1, 0].eq(0).all(), "zeros stay zero"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_saturates_and_shows_what_is_not_finite(dtype):
    x = torch.tensor([447.0, 448.0, 463.0, 464.0, 465.0, 1e4, math.inf, math.nan], dtype=dtype)
    got = stored("fp8_e4m3", torch.stack([x, -x]))
    assert got[0, :6].eq(448).all() and got[1, :6].eq(-448).all()
    assert got[:, 6:].isnan().all()


def test_int8_uses_its_whole_range_and_shows_what_is_not_finite():
    form = cache_format("int8", torch.float32)
    x = numbers(24)
    steps, scale = form.encode(x)
    assert steps.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (5, 2, 3, 1)
    largest = steps.abs().amax(-1)
    assert largest[2, 1, 0] == 0 and (largest == 127).sum() == largest.numel() - 1 and steps.min() >= -127
    x[0, 0, 0, 3], x[1, 0, 0, 3] = math.inf, math.nan
    broken = form.decode(form.encode(x)).isnan()
    assert broken[0, 0, 0].any() and broken[1, 0, 0].all() and broken.any(-1).sum() == 2
    tiny = torch.full((1, 1, 1, 8), 1e-45)  # amax / 127 is 0 in fp32
    assert form.decode(form.encode(tiny)).abs().max() <= 1e-45


def test_bytes_of_a_head():
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        for head_dim in HEAD_DIMS:
            assert bytes_per_head(cache_format(None, dtype), head_dim) == size * head_dim
            assert bytes_per_head(cache_format("fp8_e4m3", dtype), head_dim) == head_dim
            assert bytes_per_head(cache_format("int8", dtype), head_dim) == head_dim + 4


def attention_over_cache(kernel, name, q, k, v, window, pieces):
    """fp32 attention with the tokens fed in pieces -> [s, b, n, d]."""
    geometry = tiny_args(**WIDE_NON_DIVISIBLE).head_geometry()
    geometry = type(geometry)(1, q.shape[2], v.shape[2], q.shape[3])
    cache = LayerKVCache(
        geometry, q.shape[1], len(q), torch.float32, torch.device("cpu"), k.shape[2], window, kv_cache_dtype=name
    )
    rows, start = [], 0
    for size in pieces:
        new = slice(start, start + size)
        keys, values = cache.append(k[new], v[new])
        offset = len(keys) - size
        rows.append(kernel.attend(q[new], keys, values, scale=0.2, causal_offset=offset, window=window))
        start += size
    return torch.cat(rows)


def error_bound(name, q, k, v, scale):
    """How far cached k and v, each number off by half a step, can move each query's context: [s, b, n, 1].

    A query's scores move by at most e = scale * max over keys of sum(|q| * half steps), so each probability by a
    factor within exp(+-2e), and the context by the largest half step of v and (exp(2e) - 1) * max|v|.
    """
    n = q.shape[2]
    steps_k, steps_v, v = (
        x.double().repeat_interleave(n // x.shape[2], dim=2)
        for x in (largest_error(name, k), largest_error(name, v), v)
    )
    score = scale * torch.einsum("sbnd,tbnd->sbnt", q.double().abs(), steps_k).amax(-1, keepdim=True)
    largest = v.abs().amax((0, 3))[None, :, :, None]  # [1, b, n, 1]
    return steps_v.amax((0, 3))[None, :, :, None] + torch.expm1(2 * score) * largest


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FORMATS)
def test_attention_over_cached_numbers(name, kernel):
    """Equal to fp64 attention over the nearest numbers, and near to that over the true ones."""
    for geometry in (WIDE_NON_DIVISIBLE, MHA, MQA):
        n, d = geometry["num_attention_heads"], geometry["head_dim"]
        m = geometry.get("num_kv_heads", n)
        for key_heads, window, pieces in ((m, None, (7, 1, 1, 2)), (m, 3, (2, 1, 1, 5, 1, 1)), (n, 6, (11,))):
            generator = torch.Generator().manual_seed(d)
            q, k, v = (torch.randn(11, 2, heads, d, generator=generator) for heads in (n, key_heads, m))
            got = attention_over_cache(KERNELS[kernel], name, q, k, v, window, pieces)
            nearest = (REFERENCES[name](x) for x in (k, v))
            assert_close(got, core_reference(q.double(), *nearest, 0.2, window=window), FORWARD, str(pieces))
            exact = core_reference(q.double(), k.double(), v.double(), 0.2, window=window)
            difference = (got.double() - exact).abs()
            assert (difference <= error_bound(name, q, k, v, 0.2)).all(), (key_heads, window)
