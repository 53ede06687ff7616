"""Embedding, norms and MLP in a row at TP 2 and 4, with and without sequence_parallel, equal one rank."""

import numpy as np
import pytest
import torch

from megatron import mpu
from megatron.initialize import initialize_megatron
from megatron.model.init_functions import get_init_methods
from megatron.model.mlp import ParallelMLP
from megatron.model.norms import get_norm
from megatron.model.word_embeddings import EmbeddingPipe
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import MHA_TP4
from tests.helpers.tolerances import FORWARD, GRADIENT

B, S = 3, 32
CASES = {
    "gated": dict(activation="swiglu", norm="rmsnorm", pos_emb="learned", ffn_hidden_size=44),
    "plain": dict(activation="gelu", norm="layernorm", pos_emb="sinusoidal", ffn_hidden_size=20),
    "scalenorm": dict(activation="geglu", norm="scalenorm", pos_emb="none", ffn_hidden_size=12, use_bias_in_mlp=False),
}


class _Block(torch.nn.Module):
    """[b, s] tokens -> [s, b, h], the whole sequence again."""

    def __init__(self, neox_args):
        super().__init__()
        init_method, output_init_method = get_init_methods(neox_args)
        norm, eps = get_norm(neox_args)
        self.sequence_parallel = neox_args.sequence_parallel
        with mpu.parameter_scope(neox_args.seed, 0):
            self.embedding = EmbeddingPipe(neox_args, init_method)
        with mpu.parameter_scope(neox_args.seed, 2):
            self.mlp = ParallelMLP(neox_args, init_method, output_init_method)
        self.norm = norm(neox_args.hidden_size, eps, neox_args.sequence_parallel)

    def forward(self, batch):
        x = self.embedding(batch).transpose(0, 1).contiguous()
        output, bias = self.mlp(self.norm(x))
        x = x + (output if bias is None else output + bias)
        if self.sequence_parallel:
            # What follows is computed alike on all ranks here, unlike in the model.
            x = mpu.gather_from_sequence_parallel_region(x, partial_gradient=False)
        return x


def _run(rank, world_size, case, sequence_parallel):
    neox_args = tiny_args(
        **{**MHA_TP4, **CASES[case]},
        model_parallel_size=world_size,
        sequence_parallel=sequence_parallel,
        init_method_std=0.2,
    )
    initialize_megatron(neox_args)
    block = _Block(neox_args)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, neox_args.padded_vocab_size, (B, S), generator=generator)
    weights = torch.randn(S, B, neox_args.hidden_size, generator=generator)
    output = block((tokens, torch.arange(S).expand(B, S)))
    (output * weights).sum().backward()
    parameters = {}
    for name, parameter in block.named_parameters():
        dim = parameter.partition_dim if getattr(parameter, "model_parallel", False) else None
        groups = getattr(parameter, "partition_groups", None)
        parameters[name] = (parameter.detach().numpy(), parameter.grad.numpy(), dim, groups)
    return output.detach().numpy(), parameters


def _whole(name, results, index):
    """A parameter (index 0) or its gradient (1), joined over the ranks; replicated ones must be equal on all."""
    pieces = [torch.from_numpy(parameters[name][index]) for _, parameters in results]
    _, _, dim, groups = results[0][1][name]
    if dim is not None:
        return mpu.unshard(pieces, dim, groups).numpy()
    for piece in pieces[1:]:
        np.testing.assert_allclose(piece, pieces[0], rtol=1e-5, atol=1e-5, err_msg=f"{name} differs between ranks")
    return pieces[0].numpy()


@pytest.mark.parametrize("case", CASES)
def test_every_layout_equals_one_rank(case, tmp_path):
    ((expected, alone),) = run_distributed(1, _run, case, False, tmp_path=tmp_path)
    for world_size, sequence_parallel in ((2, False), (2, True), (4, True)):
        results = run_distributed(world_size, _run, case, sequence_parallel, tmp_path=tmp_path)
        for output, _ in results:
            np.testing.assert_allclose(output, expected, rtol=1e-5, atol=FORWARD[torch.float32])
        assert results[0][1].keys() == alone.keys()
        for name, (value, gradient, _, _) in alone.items():
            assert np.array_equal(_whole(name, results, 0), value), f"{name} starts differently"
            joined = _whole(name, results, 1)
            np.testing.assert_allclose(joined, gradient, rtol=1e-4, atol=GRADIENT[torch.float32], err_msg=name)
