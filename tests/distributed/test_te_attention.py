"""A whole model with Transformer Engine's attention over 2 ranks is the native one on one rank.

The same initial weights, loss, gradients, gradient norms and optimizer steps; its checkpoint reads back, also at TP 1.
"""

import os

import numpy as np
import torch

from megatron import mpu
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4, MHA_TP4, WIDE_NON_DIVISIBLE
from tests.helpers.te import install_te, requires_te
from tests.helpers.te_attention import NAMES, te_row_order
from tests.helpers.tolerances import GRADIENT, LOSS, TRAJECTORY

pytestmark = requires_te

BASE = dict(init_method="normal", output_layer_init_method="normal", init_method_std=0.1)
SWIGLU = dict(activation="swiglu", norm="rmsnorm", ffn_hidden_size=48)
CASES = {
    "gqa sequence parallel": dict(WIDE_NON_DIVISIBLE, **SWIGLU, sequence_parallel=True),
    "mha window": dict(MHA_TP4, rotary_pct=0.5, sliding_window_width=5, softmax_scale=0.4),
    "gpt_j": dict(GQA_TP4, gpt_j_residual=True),
    "gpt_j sequence parallel": dict(MHA_TP4, gpt_j_residual=True, sequence_parallel=True),
    "qkv bias checkpointed": dict(
        GQA_TP4, **SWIGLU, use_bias_in_attn_linear=False, add_qkv_bias=True, checkpoint_activations=True
    ),
}
COMMON = dict(WIDE_NON_DIVISIBLE, gradient_clipping=0.5, weight_decay=0.1)
TRAINED = {
    "plain": COMMON,
    "pipeline zero1": dict(COMMON, sequence_parallel=True, zero_optimization={"stage": 1}, pipe_parallel_size=1),
}
STEPS = 3


def _native(name):
    for native, engine in NAMES.items():
        name = name.replace(f"attention.{engine}", f"attention.{native}")
    return name


def _whole_rows(name, values, geometry, to_te):
    """Rows of a whole QKV parameter from the one order to the other; anything else is left."""
    if "attention.query_key_value" not in name:
        return values
    order = te_row_order(geometry)
    return values[order] if to_te else values[torch.argsort(order)]


def _disturb(model, args, is_te):
    """As model_runs.disturb, by native names and in native rows."""
    from tests.helpers.model_runs import _noise, named_parameters

    ranks, rank = mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()
    for te_name, parameter in named_parameters(model):
        name, dim, shape = _native(te_name), getattr(parameter, "partition_dim", None), list(parameter.shape)
        if dim is not None:
            shape[dim] *= ranks
        noise = _whole_rows(name, _noise(name, shape), args.head_geometry(), is_te) if is_te else _noise(name, shape)
        if dim is not None:
            noise = mpu.shard(noise, dim, rank, ranks, parameter.partition_groups)
        elif args.gpt_j_residual and name.endswith(("dense.bias", "linear2.bias")):
            noise = noise / ranks + (rank - (ranks - 1) / 2) * _noise(name + " apart", shape)
        with torch.no_grad():
            parameter.add_(noise)


def _pass(settings):
    """(loss, {native name: whole initial weight in native rows}, {native name: whole gradient})"""
    from megatron.initialize import initialize_megatron
    from megatron.model.gpt2_model import build_model, cross_entropy
    from tests.helpers.model_runs import batch, joined, named_parameters

    args = tiny_args(**{**BASE, **settings}, global_num_gpus=settings.get("model_parallel_size", 1))
    initialize_megatron(args)
    model = build_model(args)

    def whole(te_name, parameter, values):
        values, name = joined(parameter, values), _native(te_name)
        return name, (_whole_rows(name, values, args.head_geometry(), False) if args.te_mha else values).numpy()

    initial = dict(whole(name, parameter, parameter.detach()) for name, parameter in named_parameters(model))
    _disturb(model, args, args.te_mha)
    inputs, targets = batch()
    loss = cross_entropy(args)(model(inputs), targets)
    loss.backward()
    return loss.item(), initial, dict(whole(name, p, p.grad) for name, p in named_parameters(model))


def _training(settings, **more):
    from tests.helpers.engines import build_engine

    optimizer = {"type": "adam", "params": {"lr": 1e-2}}
    ranks = settings.get("model_parallel_size", 1)
    args = tiny_args(**{**BASE, **settings}, optimizer=optimizer, checkpoint_factor=10, global_num_gpus=ranks, **more)
    return args, build_engine(args)


def _step(args, engine, number):
    from megatron.training import train_step
    from tests.helpers.engines import _batches

    step = train_step(args, engine, _batches(args, number))
    return step["loss"], step["grad_norm"]


def _train(settings, folder=None):
    """[(loss, gradient norm)] of each step; folder: write a checkpoint there, and add a step after it."""
    from megatron.checkpointing import save_checkpoint

    args, engine = _training(settings, save=folder)
    steps = [_step(args, engine, number) for number in range(STEPS)]
    if folder is not None:
        save_checkpoint(args, STEPS, engine)
        steps.append(_step(args, engine, STEPS))
    return steps


def _train_and_resume(settings, folder):
    """The steps, and once more the last of them from the checkpoint before it."""
    steps = _train(settings, folder)
    return steps, _step(*_training(settings, load=folder, seed=77), STEPS)


def _dropout_contexts():
    """Whether both ranks' heads, made equal, still have equal contexts: without and with dropout."""
    from megatron.initialize import initialize_megatron
    from megatron.model.transformer_engine import TEMultiheadAttention

    equal = []
    for dropout, sequence_parallel in ((0.0, False), (0.5, False), (0.5, True)):
        args = tiny_args(
            **WIDE_NON_DIVISIBLE, te_mha=True, model_parallel_size=2, global_num_gpus=2, attention_dropout=dropout,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        initialize_megatron(args)
        attention = TEMultiheadAttention(args)
        torch.nn.init.normal_(attention.qkv.weight, std=0.2, generator=torch.Generator().manual_seed(1))
        contexts = []
        attention.proj.register_forward_pre_hook(lambda module, inputs, into=contexts: into.append(inputs[0]))
        attention(torch.randn(4, 2, args.hidden_size, generator=torch.Generator().manual_seed(2)))
        shares = [torch.empty_like(contexts[0]) for _ in range(2)]
        torch.distributed.all_gather(shares, contexts[0].detach().contiguous())
        equal.append(torch.equal(*shares))
    return equal


def _one_rank(rank, world_size):
    return {name: _pass(settings) for name, settings in CASES.items()}, _train(TRAINED["plain"])


def _two_ranks(rank, world_size, folder):
    install_te()
    more = dict(te_mha=True, model_parallel_size=2)
    passes = {name: _pass(dict(settings, **more)) for name, settings in CASES.items()}
    trained = {
        name: _train_and_resume(dict(settings, **more), os.path.join(folder, name))
        for name, settings in TRAINED.items()
    }
    return passes if rank == 0 else None, trained, _dropout_contexts()


def _loss_of_native_model(folder):
    """The loss of the step after the checkpoint, by a native model on one rank with the joined weights."""
    from megatron.checkpointing.reader import CheckpointReader
    from megatron.checkpointing.shards import Shards
    from megatron.model.gpt2_model import build_model, cross_entropy
    from megatron.training.batch import get_batch
    from tests.helpers.engines import _batches

    args = tiny_args(**{**BASE, **COMMON})
    reader, shards, state = CheckpointReader(folder), Shards(args), {}
    for index in reader.layer_indices(0):
        both = [reader.layer_state(index, rank) for rank in range(2)]
        for te_name in both[0]:
            whole = shards.join(index, te_name, [part[te_name] for part in both])
            if not te_name.endswith("_extra_state"):
                name = _native(te_name)
                state[f"sequential.{index}.{name}"] = _whole_rows(name, whole, args.head_geometry(), False)
    model = build_model(args)
    model.load_state_dict(state)
    inputs, targets = get_batch(args, next(_batches(args, STEPS)))
    return cross_entropy(args)(model(inputs), targets).item()


def test_a_model_over_two_ranks_is_the_native_one(tmp_path):
    ((passes, trained),) = run_distributed(1, _one_rank, tmp_path=tmp_path)
    first, second = run_distributed(2, _two_ranks, str(tmp_path), tmp_path=tmp_path, timeout=300)
    for name, (loss, initial, gradients) in passes.items():
        te_loss, te_initial, te_gradients = first[0][name]
        assert abs(te_loss - loss) <= LOSS, name
        assert te_initial.keys() == initial.keys() and te_gradients.keys() == gradients.keys(), name
        for key in initial:
            assert np.array_equal(te_initial[key], initial[key]), f"{name}: initial {key}"
            difference = np.abs(te_gradients[key] - gradients[key]).max()
            assert difference <= GRADIENT[torch.float32], f"{name}: gradient of {key} differs by {difference:.2g}"
    for name, (steps, resumed) in first[1].items():
        assert np.allclose(steps[:STEPS], trained, rtol=0, atol=TRAJECTORY), f"{name}: {steps}, not {trained}"
        assert np.allclose(resumed, steps[STEPS], rtol=0, atol=TRAJECTORY), f"{name}: resumed {resumed}"
        assert second[1][name] == (steps, resumed), f"{name}: the ranks disagree"
    assert first[2] == [True, False, False], "whether the ranks' dropout masks are equal"
    loss = _loss_of_native_model(str(tmp_path / "plain" / f"global_step{STEPS}"))
    assert abs(loss - first[1]["plain"][0][STEPS][0]) <= TRAJECTORY
