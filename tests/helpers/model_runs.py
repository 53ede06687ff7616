"""One forward and backward pass of a tiny model at any tensor-parallel size, with results joined to the master."""

import hashlib

import torch
import torch.distributed as dist

from megatron import mpu
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model, cross_entropy
from tests.helpers.configs import tiny_args

SEQ = 16


def batch(seed=0, rows=2):
    """(tokens, position_ids), (labels, loss_mask) with some tokens masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 128, (rows, SEQ + 1), generator=generator)
    mask = (torch.rand(rows, SEQ, generator=generator) > 0.2).float()
    positions = torch.arange(SEQ).expand(rows, -1).contiguous()
    return (tokens[:, :-1].contiguous(), positions), (tokens[:, 1:].contiguous(), mask)


def disturb(model, args):
    """Add noise that depends on the parameter's name only, so that biases and norms are not 0 and 1.

    The row-parallel biases of gpt_j_residual act as a sum over the ranks: their copies are made different.
    """
    ranks, rank = mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            dim = getattr(parameter, "partition_dim", None)
            shape = list(parameter.shape)
            if dim is not None:
                shape[dim] = sum(parameter.partition_groups or [shape[dim] * ranks])
            noise = _noise(name, shape)
            if dim is not None:
                noise = mpu.shard(noise, dim, rank, ranks, parameter.partition_groups)
            elif args.gpt_j_residual and name.endswith(("dense.bias", "linear2.bias")):
                noise = noise / ranks + (rank - (ranks - 1) / 2) * _noise(name + " apart", shape)
            parameter.add_(noise.to(parameter.dtype))


def _noise(name, shape):
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def named_parameters(model):
    """(layer_index.name, parameter), each once."""
    seen = set()
    for index, layer in model.local_layers():
        if isinstance(layer, torch.nn.Module):
            for name, parameter in layer.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{index}.{name}", parameter


def joined(parameter, values):
    """The master tensor from all ranks' shares; a replicated one must be equal on all ranks."""
    if mpu.get_model_parallel_world_size() == 1:
        return values.clone()
    shares = [None] * mpu.get_model_parallel_world_size()
    dist.all_gather_object(shares, values.detach().contiguous(), group=mpu.get_model_parallel_group())
    if getattr(parameter, "partition_dim", None) is not None:
        return mpu.unshard(shares, parameter.partition_dim, parameter.partition_groups)
    for share in shares[1:]:
        assert torch.allclose(shares[0], share, atol=1e-6), "a replicated tensor differs between the ranks"
    return shares[0]


def forward_backward(settings):
    """Initial weights, loss and gradients of one case on this rank's group, as numpy.

    Returns (loss, {name: initial weight}, {name: gradient}).
    """
    args = tiny_args(**settings, global_num_gpus=settings.get("model_parallel_size", 1))
    initialize_megatron(args)
    model = build_model(args)
    initial = {name: joined(p, p.detach()).numpy() for name, p in named_parameters(model)}
    disturb(model, args)
    inputs, targets = batch()
    loss = cross_entropy(args)(model(inputs), targets)
    loss.backward()
    gradients = {name: joined(p, p.grad).numpy() for name, p in named_parameters(model) if p.grad is not None}
    return loss.item(), initial, gradients
