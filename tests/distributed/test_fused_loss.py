"""The fused loss over a split vocabulary, and in training: every layout has the losses of the run without it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron import mpu
from megatron.costs.activations import Batch
from megatron.costs.memory import fused_loss_bytes
from tests.distributed.test_training_layouts import LLAMA, STEPS, figures, train_layouts, write_data
from tests.helpers.allocations import peak_bytes
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import NARROW
from tests.helpers.tolerances import FORWARD, GRADIENT, TRAJECTORY, assert_close

VOCABULARY, WIDTH, SHAPE = 24, 10, (2, 7)
FUSED = dict(fused_loss_chunk=20)
"""Micro batches are 64 tokens: chunks of 20, 20, 20 and 4."""
ZERO3 = dict(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
UNTIED = dict(LLAMA, use_bias_in_output_layer=True, final_logit_softcap=5.0)
TIED = dict(**NARROW, norm="layernorm", pos_emb="learned", no_weight_tying=False)
LAYOUTS = {
    "tp2": dict(model_parallel_size=2),
    "tp2 sequence parallel": dict(model_parallel_size=2, sequence_parallel=True, checkpoint_activations=True),
    "pp2": dict(pipe_parallel_size=2, checkpoint_activations=True, zero_optimization={"stage": 1}),
    "dp2 zero2": dict(train_micro_batch_size_per_gpu=1, zero_optimization={"stage": 2}),
    "dp2 zero3": ZERO3,
}
TIED_LAYOUTS = ("tp2 sequence parallel", "pp2", "dp2 zero3")
HALF = {
    "bf16": dict(precision="bfloat16", pipe_parallel_size=1),
    "fp16": dict(precision="fp16", fp16={"enabled": True, "initial_scale_power": 10}),
}


def _problem():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*SHAPE, WIDTH, generator=generator)
    weight, bias = torch.randn(VOCABULARY, WIDTH, generator=generator), torch.randn(VOCABULARY, generator=generator)
    labels = torch.randint(0, VOCABULARY, SHAPE, generator=generator)
    labels[0] = torch.tensor([0, 5, 6, 11, 12, 17, 23])  # the edges of every shard, on 2 and 4 ranks
    labels[1, 3] = -100
    bias[:6] += 200.0  # one rank has almost all of the probability
    mask = torch.ones(SHAPE)
    mask[1, 4] = 0.0
    return hidden, weight, bias, (labels, mask)


def _split_vocabulary(rank, world_size, cap):
    mpu.initialize_model_parallel(world_size)
    hidden, weight, bias, targets = _problem()
    hidden.requires_grad_()
    weight, bias = (each.chunk(world_size)[rank].clone().requires_grad_() for each in (weight, bias))
    whole = mpu.copy_to_model_parallel_region(hidden)
    loss = mpu.FusedLinearCrossEntropy(4, cap)(whole, weight, bias, targets)
    (loss * 14).backward()
    return loss.item(), *(each.grad.numpy() for each in (hidden, weight, bias))


@pytest.mark.parametrize("world_size, cap", [(2, None), (2, 300.0), (4, None)])
def test_a_split_vocabulary(world_size, cap, tmp_path):
    hidden, weight, bias, (labels, mask) = _problem()
    exact = [each.double().requires_grad_() for each in (hidden, weight, bias)]
    logits = F.linear(*exact)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()
    wanted = losses.sum() / mask.sum()
    (wanted * 14).backward()
    ranks = run_distributed(world_size, _split_vocabulary, cap, tmp_path=tmp_path)
    for loss, of_hidden, _, _ in ranks:
        assert loss == pytest.approx(wanted.item(), abs=0, rel=FORWARD[torch.float32])
        assert_close(torch.from_numpy(of_hidden), exact[0].grad.float(), GRADIENT, "hidden")
    for number in (1, 2):
        joined = torch.from_numpy(np.concatenate([rank[1 + number] for rank in ranks]))
        assert_close(joined, exact[number].grad.float(), GRADIENT, ("weight", "bias")[number - 1])


def _peak_of_a_large_vocabulary(rank, world_size, precision):
    """What a rank allocates at most, and the estimate."""
    mpu.initialize_model_parallel(world_size)
    args = tiny_args(
        **NARROW, precision=precision, fused_loss_chunk=256, padded_vocab_size=20480, seq_length=256,
        max_position_embeddings=256, model_parallel_size=world_size, global_num_gpus=world_size,
    )  # fmt: skip
    dtype = args.params_dtype
    hidden = torch.randn(2, 256, args.hidden_size).to(dtype).requires_grad_()
    weight = torch.randn(20480 // world_size, args.hidden_size).to(dtype).mul_(0.1).requires_grad_()
    targets = torch.zeros(2, 256, dtype=torch.int64), torch.ones(2, 256)
    loss = mpu.FusedLinearCrossEntropy(args.fused_loss_chunk)
    return peak_bytes(lambda: loss(hidden, weight, None, targets).backward()), fused_loss_bytes(
        args, Batch.of(args, "cpu")
    )


@pytest.mark.parametrize("precision", ("fp32", "bfloat16"))
def test_ranks_share_the_memory_too(precision, tmp_path):
    """bf16 logits times fp32 factors would be copied to fp32 whole."""
    for measured, estimate in run_distributed(2, _peak_of_a_large_vocabulary, precision, tmp_path=tmp_path):
        assert measured == pytest.approx(estimate, rel=0.1)


def _train(rank, world_size, folder, layouts, model):
    """fp16 too, which DeepSpeed refuses on most CPUs, though torch computes in it; what is tested is not the CPU."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True
    return train_layouts(rank, world_size, folder, layouts, model)


def _compare(folder, names, wanted_name, tolerances):
    """tolerances of losses and of gradient norms; the learning rates are equal."""
    wanted, evaluations = figures(folder, wanted_name)
    assert wanted.shape == (STEPS, 3) and wanted[-1, 0] < wanted[0, 0] - 0.1  # it learns
    for name in names:
        steps, others = figures(folder, name)
        assert (np.abs(steps - wanted).max(axis=0) <= (*tolerances, 1e-12)).all(), (name, steps - wanted)
        assert np.abs(others - evaluations).max() <= tolerances[0], name


@pytest.mark.parametrize("model, names", [(UNTIED, LAYOUTS), (TIED, TIED_LAYOUTS)], ids=["untied", "tied"])
def test_every_layout_trains_as_without_it(model, names, tmp_path):
    write_data(tmp_path)
    one = {"whole": {}, "fused": FUSED, "fused pipeline module": dict(FUSED, pipe_parallel_size=1)}
    two = {name: dict(FUSED, **LAYOUTS[name]) for name in names}
    run_distributed(1, train_layouts, str(tmp_path), one, model, tmp_path=tmp_path)
    run_distributed(2, train_layouts, str(tmp_path), two, model, tmp_path=tmp_path)
    _compare(tmp_path, [*one, *two], "whole", (TRAJECTORY, TRAJECTORY))


def test_half_precision(tmp_path):
    write_data(tmp_path)
    fused = {f"{name} fused": dict(layout, **FUSED) for name, layout in HALF.items()}
    run_distributed(1, _train, str(tmp_path), {**HALF, **fused}, TIED, tmp_path=tmp_path)
    for name in HALF:
        _compare(tmp_path, [f"{name} fused"], name, (2e-2, 5e-2))
