"""Compiled layers over tensor-parallel ranks and pipeline stages: losses and gradients of one uncompiled process.

Compiled by torch's front end only: what inductor does to a piece does not depend on the ranks.
"""

from functools import partial

import pytest
import torch

from megatron.model import compiling
from tests.distributed.test_model_pipeline import CASES, _assert_same_training, _train_pipeline, _train_sequential
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4
from tests.helpers.model_runs import forward_backward
from tests.helpers.tolerances import GRADIENT, LOSS

MODEL = dict(
    GQA_TP4, norm="rmsnorm", activation="swiglu", ffn_hidden_size=44, use_bias_in_mlp=False, num_layers=2,
    qk_norm_type="per_head",
)  # fmt: skip
PIPELINE = "untied gated checkpointed"
FULL_WIDTH = dict(MODEL, qk_norm_type="full_width")


def _compiled(function, *args):
    """(result, number of pieces that were compiled); a rank is a process of its own."""
    graphs, compile = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiling.compiled.cache_clear()
    torch.compile = partial(compile, backend=backend)
    try:
        return function(*args), len(graphs)
    finally:
        torch.compile = compile
        compiling.compiled.cache_clear()


def _tensor_parallel(rank, world_size):
    settings = dict(compile=True, model_parallel_size=world_size)
    cases = (dict(MODEL, **settings), dict(FULL_WIDTH, **settings, sequence_parallel=True))
    return [_compiled(forward_backward, case) for case in cases]


def test_two_tensor_parallel_ranks(tmp_path):
    for results in run_distributed(2, _tensor_parallel, tmp_path=tmp_path):
        for settings, ((loss, _, gradients), graphs) in zip((MODEL, FULL_WIDTH), results, strict=True):
            expected_loss, _, expected = forward_backward(settings)
            assert graphs > 0 and loss == pytest.approx(expected_loss, abs=LOSS)
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                assert abs(gradients[name] - gradient).max() <= GRADIENT[torch.float32], name


def _pipeline(rank, world_size):
    return _compiled(_train_pipeline, dict(CASES[PIPELINE], compile=True), world_size, 1)


def _sequential(rank, world_size):
    return _train_sequential(CASES[PIPELINE])


def test_two_pipeline_stages_with_activation_checkpointing(tmp_path):
    (sequential,) = run_distributed(1, _sequential, tmp_path=tmp_path)
    stages = run_distributed(2, _pipeline, tmp_path=tmp_path)
    assert all(graphs > 0 for _, graphs in stages)
    _assert_same_training(PIPELINE, sequential, [trained for trained, _ in stages])
