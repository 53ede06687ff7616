"""Transformer Engine's layers over tensor-parallel ranks, with and without sequence parallelism, against TP 1.

The truth at TP 1 is the model without Transformer Engine, which tests/unit/test_te_layers.py holds against formulas.
"""

import numpy as np
import pytest
import torch

from megatron import mpu
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model, cross_entropy
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4, MHA_TP4, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import batch, joined, named_parameters
from tests.helpers.te import install_te, requires_te
from tests.helpers.te_layers import native_layout, native_name
from tests.helpers.tolerances import FORWARD, GRADIENT, LOSS

pytestmark = requires_te

S, B, IN, MID, OUT = 8, 3, 10, 24, 14
SHORT = dict(seq_length=16, max_position_embeddings=16)
LAYERS = dict(te_columnparallel=True, te_rowparallel=True)
SEED, LAYER = 7, 2


def _noise(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# The linear layers by themselves


def _linears(column, row, args, **options):
    init = torch.nn.init.normal_
    with mpu.parameter_scope(SEED, LAYER):
        return [
            column(args, IN, MID, init_method=init, **options),
            column(args, IN, MID, init_method=init, bias=False, row_groups=[16, 8], **options),
            column(args, IN, MID, init_method=init, row_groups=[13, 11], skip_bias_add=True, **options),
            row(args, MID, OUT, init_method=init, **options),
            row(args, MID, OUT, init_method=init, skip_bias_add=True, column_groups=[16, 8], **options),
        ]


def _through(layers, x, weights):
    """Outputs and all gradients of layers[0..2] on x and of the rows on tanh of the first; one scalar of them all."""
    x = x.clone().requires_grad_()
    first, _ = layers[0](x)
    second, _ = layers[1](x)
    third, bias = layers[2](x)
    outputs = [first, second, third + bias]
    for layer in layers[3:]:
        output, bias = layer(torch.tanh(first))
        outputs.append(output if bias is None else output + bias)
    sum((output * weights(number, output)).sum() for number, output in enumerate(outputs)).backward()
    gradients = [p.grad for layer in layers for p in layer.parameters()]
    return [tensor.detach().numpy() for tensor in (*outputs, x.grad, *gradients)]


def _linear_cases(rank, world_size):
    """TE's layers give what mpu's do on the same ranks, which other tests hold against fp64; see `_switched`."""
    from megatron.model.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    mpu.initialize_model_parallel(world_size)
    args = tiny_args()
    kinds = [(TEColumnParallelLinear, TERowParallelLinear), (mpu.ColumnParallelLinear, mpu.RowParallelLinear)]
    for options in (dict(), dict(sequence_parallel=True), dict(sequence_parallel=True, seq_dim=1)):
        x = _noise(*([B, S] if "seq_dim" in options else [S, B]), IN)
        if options:
            x = x.chunk(world_size, options.get("seq_dim", 0))[rank].contiguous()
        both = []
        for column, row in kinds:
            layers = _linears(column, row, args, **options)
            _fill_biases(layers, rank)
            both.append(_through(layers, x, lambda number, output: _noise(*output.shape, seed=number)))
        for mine, theirs in zip(*both, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=GRADIENT[torch.float32], rtol=1e-5, err_msg=str(options))
    results = _switched(args, *kinds[0])
    mpu.destroy_model_parallel()
    return results


def _fill_biases(layers, rank):
    """Those of row-parallel layers are the same on all ranks."""
    for number, layer in enumerate(layers):
        if isinstance(layer.bias, torch.nn.Parameter):
            with torch.no_grad():
                layer.bias.copy_(_noise(*layer.bias.shape, seed=rank if number < 3 else 0))


def _switched(args, column, row):
    """gather_output, input_is_parallel=False and parallel_output, and what set_parallel_output changes."""
    init = torch.nn.init.normal_
    with mpu.parameter_scope(SEED, LAYER):
        gathered = column(args, IN, MID, init_method=init, gather_output=True)
    with mpu.parameter_scope(SEED, LAYER):
        reduced = row(args, IN, OUT, init_method=init, input_is_parallel=False, bias=False)
    x = _noise(S, B, IN)
    results = [gathered(x)[0], reduced(x)[0]]
    gathered.set_parallel_output(True)
    reduced.set_parallel_output(True)
    results += [gathered(x)[0], reduced(x)[0]]
    return [tensor.detach().numpy() for tensor in results]


def _check_linear(results):
    x = _noise(S, B, IN).double()
    with mpu.parameter_scope(SEED, LAYER):
        column = mpu.create_parameter(tiny_args(), (MID, IN), torch.nn.init.normal_).detach().double()
    with mpu.parameter_scope(SEED, LAYER):
        row = mpu.create_parameter(tiny_args(), (OUT, IN), torch.nn.init.normal_).detach().double()
    column, row = (torch.einsum("sbi,oi->sbo", x, weight).numpy() for weight in (column, row))
    close = dict(atol=FORWARD[torch.float32], rtol=1e-5)
    for rank, (gathered, reduced, piece, _) in enumerate(results):
        np.testing.assert_allclose(gathered, column, **close)
        np.testing.assert_allclose(reduced, row, **close)
        np.testing.assert_allclose(piece, np.split(column, 2, -1)[rank], **close)
    np.testing.assert_allclose(results[0][3] + results[1][3], row, **close)


# Whole models

COMMON = dict(init_method_std=0.1, **SHORT)
MODELS = {
    "linear layers": dict(GQA_TP4, **LAYERS, norm="rmsnorm", activation="swiglu", ffn_hidden_size=44),
    "norm and mlp": dict(
        WIDE_NON_DIVISIBLE, te_layernorm_mlp=True, norm="te_layernorm", bias_gelu_fusion=True, ffn_hidden_size=44
    ),
    "parallel residual": dict(
        MHA_TP4, **LAYERS, te_layernorm_mlp=True, norm="te_rmsnorm", gpt_j_residual=True, activation="geglu_tanh"
    ),
    "heads": dict(WIDE_NON_DIVISIBLE, **LAYERS, norm="te_rmsnorm", qk_norm_type="per_head", zero_centered_gamma=True),
}
LAYOUTS = {"tensor": {}, "sequence": dict(sequence_parallel=True)}


def _without_te(settings):
    native = {key: value for key, value in settings.items() if not key.startswith("te_")}
    return {**native, "norm": native["norm"].removeprefix("te_")}


def _noise_of(name, whole):
    """For each parameter of the native model: added to its initial value, so that biases and norms are not 0 and 1."""
    seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(name))
    return _noise(*whole.shape, seed=seed) * 0.1


def _model_cases(rank, world_size):
    """{(model, layout): (loss, {native name: whole gradient with native rows})}"""
    results = {}
    for name, settings in MODELS.items():
        for layout, more in LAYOUTS.items():
            args = tiny_args(
                **{**COMMON, **settings, **more}, model_parallel_size=world_size, global_num_gpus=world_size
            )
            initialize_megatron(args)
            results[name, layout] = _loss_and_gradients(args)
    return results


def _loss_and_gradients(args):
    model = build_model(args)
    gated = args.mlp_geometry().gated
    for key, parameter in named_parameters(model):
        whole = torch.from_numpy(joined(parameter, parameter.detach()).numpy())
        noise = native_layout(key.rpartition(".")[2], _noise_of(native_name(key, args.norm), whole), gated)
        _add_share(parameter, noise, key, args)
    inputs, targets = batch()
    loss = cross_entropy(args)(model(inputs), targets)
    loss.backward()
    gradients = {}
    for key, parameter in named_parameters(model):
        if parameter.grad is not None:
            whole = joined(parameter, parameter.grad)
            gradients[native_name(key, args.norm)] = native_layout(key.rpartition(".")[2], whole, gated).numpy()
    return loss.item(), gradients


def _add_share(parameter, noise, key, args):
    """This rank's share of `noise`; the summed biases of a parallel residual get a part of it each."""
    ranks, rank = mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()
    dim = getattr(parameter, "partition_dim", None)
    if dim is not None:
        noise = mpu.shard(noise, dim, rank, ranks, parameter.partition_groups)
    elif args.gpt_j_residual and key.endswith(("dense.bias", "fc2_bias", "linear2.bias")):
        noise = noise / ranks
    with torch.no_grad():
        parameter.add_(noise)


def _check_models(results):
    """Initial weights are drawn on all ranks, not copied, so equal gradients mean equal initial weights too."""
    for name, settings in MODELS.items():
        true_loss, true_gradients = _loss_and_gradients(tiny_args(**{**COMMON, **_without_te(settings)}))
        for layout in LAYOUTS:
            loss, gradients = results[name, layout]
            assert abs(loss - true_loss) < LOSS, (name, layout)
            assert gradients.keys() == true_gradients.keys()
            for key, gradient in true_gradients.items():
                what = f"{name} {layout} {key}"
                np.testing.assert_allclose(gradients[key], gradient, atol=GRADIENT[torch.float32], rtol=0, err_msg=what)


def _fp8_group(monkeypatch):
    """The ranks that agree on FP8's ranges: those of the tensor-parallel group."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    from megatron.model.transformer_engine import fp8_context

    monkeypatch.setattr(FP8GlobalStateManager, "is_fp8_available", classmethod(lambda cls: (True, "")))
    args = tiny_args(te_fp8_mha=True, precision="bfloat16", model_parallel_size=2, global_num_gpus=2)
    with fp8_context(args):
        assert FP8GlobalStateManager.get_fp8_group() is mpu.get_model_parallel_group()


def _all_cases(rank, world_size):
    install_te()
    linear, models = _linear_cases(rank, world_size), _model_cases(rank, world_size)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _fp8_group(monkeypatch)
    return linear, models


def test_two_ranks_give_what_one_gives(tmp_path):
    """One start of the ranks for all: each takes seconds to import Transformer Engine."""
    results = run_distributed(2, _all_cases, tmp_path=tmp_path)
    _check_linear([linear for linear, _ in results])
    for _, models in results:
        _check_models(models)
