"""The flash kernel against the fp64 reference, in value and gradient."""

import torch

from megatron.model.attention.core import flash
from tests.helpers.attention_reference import core_reference
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

BATCH = 2
MHA, GQA, MQA = (3, 3, 3), (6, 2, 2), (5, 1, 1)
"""Heads of queries, keys and values."""
MORE_KEY_HEADS = (6, 6, 2)
"""As a norm with a weight per query head leaves them."""


def compare(heads, width, dtype, queries=19, keys=None, scale=None, **options):
    """Assert equality. queries, keys: tokens; fewer queries than keys are the last ones. Returns the output."""
    keys = queries if keys is None else keys
    scale = width**-0.5 if scale is None else scale
    generator = torch.Generator().manual_seed(width)
    shapes = [(tokens, BATCH, n, width) for tokens, n in zip((queries, keys, keys), heads, strict=True)]
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    given = [x.clone().requires_grad_() for x in drawn]
    wide = [x.double().requires_grad_() for x in drawn]

    ours = flash.attend(*given, scale=scale, causal_offset=keys - queries, **options)
    wanted = core_reference(
        *wide, scale, offset=keys - queries, window=options.get("window"), softcap=options.get("softcap")
    )
    what = f"heads {heads}, head_dim {width}, {dtype}, {queries} queries, {keys} keys, {options}"
    assert ours.dtype == dtype
    assert_close(ours, wanted, FORWARD, what)
    upstream = torch.randn(wanted.shape, generator=generator).to(dtype)
    ours.backward(upstream)
    wanted.backward(upstream.double())
    for name, x, reference in zip("qkv", given, wide, strict=True):
        assert_close(x.grad, reference.grad, GRADIENT, f"gradient of {name}, {what}")
    return ours
