"""Sharded layers against plain matrix products in fp64: initial weights, outputs and every gradient at TP 1, 2, 4."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron import mpu
from megatron.mpu.init import parameter_seed
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

SEED, LAYER = 1234, 3
S, B, IN, MID, OUT, VOCABULARY = 8, 3, 10, 24, 14, 40
GROUPS = [16, 8]
"""Two stacked blocks of unlike size in the rows of a column-parallel weight, as k below q."""
STRIDE = 2

SETTINGS = SimpleNamespace(params_dtype=torch.float32, use_cpu_initialization=False)


def _init(tensor, generator=None):
    return tensor.normal_(generator=generator)


def _master(number, rows, columns):
    """What parameter `number` of the layer must hold over all ranks."""
    generator = torch.Generator().manual_seed(parameter_seed(SEED, LAYER, number))
    return torch.empty(rows, columns).normal_(generator=generator)


MASTERS = {
    "plain": _master(0, MID, IN),
    "grouped": _master(1, MID, IN),
    "strided": _master(2, MID, IN),
    "row": _master(3, OUT, MID),
    "table": _master(4, VOCABULARY, IN),
}


def _rows_of(name, rank, world_size):
    """Rows of the master that a rank holds, by an independent rule: row r of a block belongs to rank r * p // size."""
    blocks = {"plain": [MID], "grouped": GROUPS, "strided": [MID // STRIDE] * STRIDE, "table": [VOCABULARY]}[name]
    owners = [row * world_size // size for size in blocks for row in range(size)]
    return [row for row, owner in enumerate(owners) if owner == rank]


def _layers(sequence_parallel=False, skip_bias_add=False):
    with mpu.parameter_scope(SEED, LAYER):
        column = dict(init_method=_init, sequence_parallel=sequence_parallel)
        plain = mpu.ColumnParallelLinear(SETTINGS, IN, MID, **column)
        grouped = mpu.ColumnParallelLinear(SETTINGS, IN, MID, bias=False, row_groups=GROUPS, **column)
        strided = mpu.ColumnParallelLinear(SETTINGS, IN, MID, stride=STRIDE, skip_bias_add=True, **column)
        row = mpu.RowParallelLinear(
            SETTINGS, MID, OUT, init_method=_init, sequence_parallel=sequence_parallel, skip_bias_add=skip_bias_add
        )
        table = mpu.VocabParallelEmbedding(SETTINGS, VOCABULARY, IN, init_method=_init)
    return SimpleNamespace(plain=plain, grouped=grouped, strided=strided, row=row, table=table)


def _inputs():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (S, B), generator=generator)
    weights = torch.randn(S, B, OUT, generator=generator)
    column_bias = torch.randn(MID, generator=generator)
    row_bias = torch.randn(OUT, generator=generator)
    return ids, weights, column_bias, row_bias


def _truth():
    """y = tanh(plain(x)) + grouped(x) (+ a bias) through the row layer, on one rank, in fp64."""
    ids, weights, column_bias, row_bias = _inputs()
    leaves = {name: master.double().requires_grad_() for name, master in MASTERS.items()}
    leaves["column_bias"] = column_bias.double().requires_grad_()
    leaves["row_bias"] = row_bias.double().requires_grad_()
    x = leaves["table"][ids]
    middle = torch.tanh(x @ leaves["plain"].T + leaves["column_bias"])
    # The strided and grouped layers order their outputs differently, so they meet `plain` only through a sum.
    output = middle @ leaves["row"].T + leaves["row_bias"]
    extra = (x @ leaves["grouped"].T).square().sum() + (x @ leaves["strided"].T).pow(3).sum() * 0.01
    ((output * weights.double()).sum() + extra).backward()
    return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def _run(rank, world_size, sequence_parallel, skip_bias_add):
    mpu.initialize_model_parallel(world_size)
    layers = _layers(sequence_parallel, skip_bias_add)
    initial = {name: getattr(layers, name).weight.detach().numpy().copy() for name in MASTERS}
    ids, weights, column_bias, row_bias = _inputs()
    with torch.no_grad():
        layers.plain.bias.copy_(column_bias[_rows_of("plain", rank, world_size)])
        layers.row.bias.copy_(row_bias)
    x = layers.table(ids)
    if sequence_parallel:
        x = mpu.scatter_to_sequence_parallel_region(x)
        weights = weights.chunk(world_size, 0)[rank]
    middle, no_bias = layers.plain(x)
    assert no_bias is None
    output, bias = layers.row(torch.tanh(middle))
    assert (bias is not None) == skip_bias_add
    if skip_bias_add:
        output = output + bias
    strided, strided_bias = layers.strided(x)
    assert strided_bias is layers.strided.bias
    extra = layers.grouped(x)[0].square().sum() + strided.pow(3).sum() * 0.01
    ((output * weights).sum() + extra).backward()
    gradients = {name: getattr(layers, name).weight.grad.numpy() for name in MASTERS}
    gradients["column_bias"] = layers.plain.bias.grad.numpy()
    gradients["row_bias"] = layers.row.bias.grad.numpy()
    marks = [getattr(p, "model_parallel", False) for p in (layers.plain.weight, layers.plain.bias, layers.row.weight)]
    assert marks == [True] * 3 and not hasattr(layers.row.bias, "model_parallel")
    return initial, output.detach().numpy(), gradients


def _slice(name, master, rank, world_size):
    """The part of a master tensor, or of its gradient, that belongs to a rank."""
    if name == "row":
        return master.chunk(world_size, 1)[rank]
    if name == "row_bias":
        return master
    return master[_rows_of("plain" if name == "column_bias" else name, rank, world_size)]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers(world_size, sequence_parallel, tmp_path):
    output, gradients = _truth()
    skip_bias_add = world_size == 2
    results = run_distributed(world_size, _run, sequence_parallel, skip_bias_add, tmp_path=tmp_path)
    for rank, (initial, rank_output, rank_gradients) in enumerate(results):
        for name, master in MASTERS.items():
            assert np.array_equal(initial[name], _slice(name, master, rank, world_size).numpy()), name
        expected = output.chunk(world_size, 0)[rank] if sequence_parallel else output
        np.testing.assert_allclose(rank_output, expected.numpy(), rtol=1e-5, atol=10 * FORWARD[torch.float32])
        for name, gradient in gradients.items():
            mine = _slice(name, gradient, rank, world_size).numpy()
            np.testing.assert_allclose(rank_gradients[name], mine, rtol=1e-5, atol=10 * GRADIENT[torch.float32])


def _gathered_and_partial(rank, world_size):
    """gather_output, input_is_parallel=False, parallel_output, and what set_parallel_output changes."""
    mpu.initialize_model_parallel(world_size)
    x = torch.randn(S, B, IN, generator=torch.Generator().manual_seed(6))
    with mpu.parameter_scope(SEED, LAYER):
        column = mpu.ColumnParallelLinear(SETTINGS, IN, MID, init_method=_init, gather_output=True)
    with mpu.parameter_scope(SEED, LAYER):
        row = mpu.RowParallelLinear(SETTINGS, IN, OUT, init_method=_init, input_is_parallel=world_size == 1)
    with torch.no_grad():
        row.bias.fill_(0.5)
    results = {"column": column(x)[0], "row": row(x)[0]}
    column.set_parallel_output(True)
    row.set_parallel_output(True)
    results.update(column_piece=column(x)[0], row_term=row(x)[0])
    return {name: value.detach().numpy() for name, value in results.items()}


def test_whole_and_partial_outputs(tmp_path):
    x = torch.randn(S, B, IN, generator=torch.Generator().manual_seed(6)).double()
    column = x @ _master(0, MID, IN).double().T
    row = x @ _master(0, OUT, IN).double().T + 0.5
    world_size = 2
    results = run_distributed(world_size, _gathered_and_partial, tmp_path=tmp_path)
    for rank, values in enumerate(results):
        assert_close(torch.from_numpy(values["column"]), column, what="gathered")
        assert_close(torch.from_numpy(values["row"]), row, what="reduced")
        assert_close(torch.from_numpy(values["column_piece"]), column.chunk(world_size, -1)[rank], what="piece")
    # Each rank adds its own bias to its term, so their sum has it once for each.
    assert_close(torch.from_numpy(sum(values["row_term"] for values in results)), row + 0.5, what="terms")


def _bad_ids(rank, world_size):
    mpu.initialize_model_parallel(world_size)
    table = mpu.VocabParallelEmbedding(SETTINGS, VOCABULARY, IN, init_method=_init)
    for bad in (VOCABULARY, -1):
        with pytest.raises(IndexError):
            table(torch.tensor([[0, bad]]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_id_outside_the_vocabulary_fails_on_every_rank(world_size, tmp_path):
    run_distributed(world_size, _bad_ids, tmp_path=tmp_path)


def _sequence_in_dimension_1(rank, world_size):
    """A column layer and a row layer on [b, s, h], the first with a frozen weight."""
    mpu.initialize_model_parallel(world_size)
    options = dict(init_method=_init, sequence_parallel=True, seq_dim=1)
    with mpu.parameter_scope(SEED, LAYER):
        column = mpu.ColumnParallelLinear(SETTINGS, IN, MID, **options)
        row = mpu.RowParallelLinear(SETTINGS, MID, OUT, **options)
    column.weight.requires_grad_(False)
    x = torch.randn(B, S, IN, generator=torch.Generator().manual_seed(6)).chunk(world_size, 1)[rank].contiguous()
    x.requires_grad_()
    output = row(torch.tanh(column(x)[0]))[0]
    output.square().sum().backward()
    assert column.weight.grad is None and column.bias.grad is not None
    return output.detach().numpy(), x.grad.numpy()


def test_sequence_parallel_along_dimension_1(tmp_path):
    x = torch.randn(B, S, IN, generator=torch.Generator().manual_seed(6)).double().requires_grad_()
    output = torch.tanh(x @ _master(0, MID, IN).double().T) @ _master(1, OUT, MID).double().T
    output.square().sum().backward()
    outputs, gradients = zip(*run_distributed(2, _sequence_in_dimension_1, tmp_path=tmp_path), strict=True)
    np.testing.assert_allclose(np.concatenate(outputs, 1), output.detach(), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(np.concatenate(gradients, 1), x.grad, rtol=1e-4, atol=1e-3)
