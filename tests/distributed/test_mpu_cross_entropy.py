"""Vocab-parallel cross entropy against torch's in fp64, on 1, 2 and 4 ranks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron import mpu
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

VOCABULARY = 24
SHAPE = (3, 5)


def _inputs(scale=1.0):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(*SHAPE, VOCABULARY, generator=generator, dtype=torch.float64) * 6 * scale
    labels = torch.randint(0, VOCABULARY, SHAPE, generator=generator)
    labels[0, 1] = labels[2, 4] = -100
    # The first and the last row of every shard, on 2 and 4 ranks.
    labels[1] = torch.tensor([0, 5, 6, 11, 12])
    labels[2, :4] = torch.tensor([17, 18, 22, 23])
    weights = torch.randn(*SHAPE, generator=generator, dtype=torch.float64)
    return logits, labels, weights


def _truth(dtype, scale=1.0):
    logits, labels, weights = _inputs(scale)
    logits = logits.to(dtype).double().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(SHAPE)
    (loss * weights).sum().backward()
    return loss.detach(), logits.grad


def _run(rank, world_size, dtype, scale, in_half):
    mpu.initialize_model_parallel(world_size)
    logits, labels, weights = _inputs(scale)
    shard = logits.to(dtype).chunk(world_size, -1)[rank].contiguous().requires_grad_()
    before = shard.detach().clone()
    loss = mpu.vocab_parallel_cross_entropy(shard, labels, in_half=in_half)
    assert loss.dtype == torch.float32
    (loss * weights.float()).sum().backward()
    assert torch.equal(shard.detach(), before), "the logits were changed"
    assert shard.grad.dtype == dtype
    ignored = shard.grad[labels == -100]
    assert torch.equal(ignored, torch.zeros_like(ignored))
    assert (loss[labels == -100] == 0).all()
    return loss.detach().numpy(), shard.grad.double().numpy()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_torch(world_size, tmp_path):
    loss, gradient = _truth(torch.float32)
    ranks = run_distributed(world_size, _run, torch.float32, 1.0, False, tmp_path=tmp_path)
    for rank_loss, _ in ranks:
        assert_close(torch.from_numpy(rank_loss), loss, what="loss")
    joined = torch.from_numpy(np.concatenate([gradient for _, gradient in ranks], -1))
    assert_close(joined.float(), gradient, GRADIENT, "gradient of the logits")


def test_huge_logits_do_not_overflow(tmp_path):
    loss, gradient = _truth(torch.float32, scale=1e4)
    ranks = run_distributed(2, _run, torch.float32, 1e4, False, tmp_path=tmp_path)
    np.testing.assert_allclose(ranks[0][0], loss.numpy(), rtol=1e-6)
    joined = np.concatenate([gradient for _, gradient in ranks], -1)
    np.testing.assert_allclose(joined, gradient.numpy(), atol=1e-5)


def test_half_logits_are_summed_in_fp32_unless_asked(tmp_path):
    loss, _ = _truth(torch.bfloat16)
    in_fp32 = run_distributed(2, _run, torch.bfloat16, 1.0, False, tmp_path=tmp_path)[0][0]
    np.testing.assert_allclose(in_fp32, loss.numpy(), atol=FORWARD[torch.float32])
    in_half = run_distributed(2, _run, torch.bfloat16, 1.0, True, tmp_path=tmp_path)[0][0]
    assert np.abs(in_half - loss.numpy()).max() > FORWARD[torch.float32], "this was not computed in half precision"
    np.testing.assert_allclose(in_half, loss.numpy(), rtol=0.02, atol=0.02)


def _label_outside(rank, world_size):
    mpu.initialize_model_parallel(world_size)
    logits = torch.zeros(2, VOCABULARY // world_size)
    for label in (VOCABULARY, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            mpu.vocab_parallel_cross_entropy(logits, torch.tensor([0, label]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_label_outside_the_vocabulary_fails(world_size, tmp_path):
    run_distributed(world_size, _label_outside, tmp_path=tmp_path)
