"""DeepSpeed's engine given our mpu: clipped steps at TP x DP and every ZeRO stage equal one process."""

import numpy as np
import torch

from megatron import mpu
from megatron.initialize import initialize_megatron
from megatron.model.init_functions import get_init_methods
from megatron.model.mlp import ParallelMLP
from megatron.model.norms import get_norm
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import MHA_TP4
from tests.helpers.tolerances import TRAJECTORY

STEPS, BATCH, CLIP, NO_CLIP = 4, 8, 0.5, 1e9
SETTINGS = dict(MHA_TP4, activation="swiglu", norm="rmsnorm", ffn_hidden_size=12, init_method_std=0.1)


class _Residual(torch.nn.Module):
    """Sharded and replicated parameters, norms and biases."""

    def __init__(self, neox_args):
        super().__init__()
        norm, eps = get_norm(neox_args)
        self.norm = norm(neox_args.hidden_size, eps, neox_args.sequence_parallel)
        with mpu.parameter_scope(neox_args.seed, 0):
            self.mlp = ParallelMLP(neox_args, *get_init_methods(neox_args))

    def forward(self, x):
        output, bias = self.mlp(self.norm(x))
        return x + output + bias


def _train(world_size, model_parallel_size, stage, clip):
    import deepspeed

    neox_args = tiny_args(**SETTINGS, model_parallel_size=model_parallel_size, global_num_gpus=world_size)
    initialize_megatron(neox_args)
    replicas = mpu.get_data_parallel_world_size()
    model = _Residual(neox_args)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        mpu=mpu,
        config=dict(
            train_micro_batch_size_per_gpu=BATCH // replicas,
            train_batch_size=BATCH,
            gradient_clipping=clip,
            zero_optimization=dict(stage=stage),
            zero_allow_untested_optimizer=True,
            zero_force_ds_cpu_optimizer=False,
        ),
    )
    generator = torch.Generator().manual_seed(9)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(4, BATCH, neox_args.hidden_size, generator=generator)
        x = x.chunk(replicas, 1)[mpu.get_data_parallel_rank()].contiguous()
        loss = (engine(x) - 1).square().sum(-1).mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
        losses.append(total.item() / replicas)
    return losses


def _run(rank, world_size, cases):
    """cases: (model_parallel_size, ZeRO stage, clipping) each."""
    return [_train(world_size, *case) for case in cases]


def test_engine_steps(tmp_path):
    ((losses, unclipped),) = run_distributed(1, _run, [(1, 0, CLIP), (1, 0, NO_CLIP)], tmp_path=tmp_path)
    assert abs(losses[-1] - unclipped[-1]) > 1, "clipping does not act, so a wrong gradient norm would not show"
    _compare(losses, 2, [(2, 0, CLIP), (1, 2, CLIP)], tmp_path)
    _compare(losses, 4, [(2, 1, CLIP), (2, 3, CLIP)], tmp_path)


def _compare(losses, world_size, cases, tmp_path):
    for results in run_distributed(world_size, _run, cases, tmp_path=tmp_path):
        for case, case_losses in zip(cases, results, strict=True):
            np.testing.assert_allclose(case_losses, losses, atol=TRAJECTORY, rtol=1e-5, err_msg=f"losses {case}")
