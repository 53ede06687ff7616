"""Initial weights: the statistics each method promises, and seeds that make every parameter's draw its own."""

import math

import pytest
import torch

from megatron import mpu
from megatron.model.init_functions import get_init_methods
from megatron.mpu.init import PARAMETERS_PER_LAYER, parameter_seed
from tests.helpers.configs import tiny_args

LAYERS, HIDDEN, SIGMA = 3, 96, 0.05
ROWS, COLUMNS = 300, 200

STANDARD_DEVIATIONS = {
    "normal": SIGMA,
    "scaled_normal": SIGMA / math.sqrt(2 * LAYERS),
    "single_residual_scaled_normal": SIGMA / math.sqrt(LAYERS),
    "small_init": math.sqrt(2 / (5 * HIDDEN)),
    "wang_init": 2 / LAYERS / math.sqrt(HIDDEN),
    "xavier_normal": math.sqrt(2 / (ROWS + COLUMNS)),
    "xavier_uniform": math.sqrt(2 / (ROWS + COLUMNS)),
}
GAINS = {"orthogonal": math.sqrt(2), "scaled_orthogonal": math.sqrt(2 / LAYERS)}


def _args(name, output_name="normal"):
    return tiny_args(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        init_method=name,
        output_layer_init_method=output_name,
        init_method_std=SIGMA,
    )


def _draw(method, rows=ROWS, columns=COLUMNS, seed=1):
    return method(torch.empty(rows, columns), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", STANDARD_DEVIATIONS)
def test_standard_deviation(name):
    weight = _draw(get_init_methods(_args(name))[0])
    # The standard error of these estimates is std / sqrt(2 x 60000) = 0.3 %.
    assert weight.std().item() == pytest.approx(STANDARD_DEVIATIONS[name], rel=0.02)
    assert abs(weight.mean().item()) < 0.02 * STANDARD_DEVIATIONS[name]
    largest = weight.abs().max().item() / STANDARD_DEVIATIONS[name]
    assert largest <= math.sqrt(3) if name == "xavier_uniform" else largest > 3


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32)])
@pytest.mark.parametrize("name", GAINS)
def test_orthogonal(name, shape):
    weight = _draw(get_init_methods(_args(name))[0], *shape).double()
    square = weight.T @ weight if shape[0] >= shape[1] else weight @ weight.T
    torch.testing.assert_close(square, GAINS[name] ** 2 * torch.eye(min(shape)).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [*STANDARD_DEVIATIONS, *GAINS])
def test_the_generator_decides(name):
    method, output_method = get_init_methods(_args("normal", name))
    first, again, other = _draw(output_method), _draw(output_method), _draw(output_method, seed=2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(3)
    free = output_method(torch.empty(8, 8))
    torch.manual_seed(3)
    assert torch.equal(free, output_method(torch.empty(8, 8)))
    assert not torch.equal(_draw(method), first) or name == "normal"


@pytest.mark.parametrize("width", [80, 57])
def test_more_padding_leaves_the_vocabulary_as_it_was(width):
    """The padded vocabulary grows with the number of model-parallel ranks; the rows before it must not change."""
    method, _ = get_init_methods(_args("normal"))
    assert torch.equal(_draw(method, 3 * 128, width), _draw(method, 2 * 256, width)[: 3 * 128])


def test_parameters_have_seeds_of_their_own():
    layers, parameters = 200, 30
    seeds = {parameter_seed(1234, layer, number) for layer in range(layers) for number in range(parameters)}
    assert len(seeds) == layers * parameters
    assert all(0 <= seed < 2**32 for seed in seeds)
    neighbours = {parameter_seed(1235, layer, number) for layer in range(layers) for number in range(parameters)}
    assert len(seeds & neighbours) < 3, "runs with neighbouring seeds share weights"
    assert parameters < PARAMETERS_PER_LAYER


def _two(seed, layer):
    with mpu.parameter_scope(seed, layer):
        return [torch.rand(4, generator=mpu.next_generator(torch.device("cpu"))) for _ in range(2)]


def test_parameter_scope():
    assert mpu.next_generator(torch.device("cpu")) is None
    first, second = _two(1, 5)
    assert not torch.equal(first, second)
    torch.rand(7)  # what happens outside makes no difference
    assert torch.equal(_two(1, 5)[1], second)
    assert not torch.equal(_two(1, 6)[0], first) and not torch.equal(_two(2, 5)[0], first)


def test_parameter_scopes_nest_and_end():
    cpu = torch.device("cpu")
    with mpu.parameter_scope(1, 5):
        mpu.next_generator(cpu)
        with mpu.parameter_scope(1, 6):
            mpu.next_generator(cpu)
        assert torch.equal(torch.rand(4, generator=mpu.next_generator(cpu)), _two(1, 5)[1])
    with pytest.raises(RuntimeError), mpu.parameter_scope(1, 5):
        raise RuntimeError
    assert mpu.next_generator(cpu) is None
