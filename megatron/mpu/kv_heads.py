"""Fewer key/value heads than model-parallel ranks: each head's numbers are dealt out to the ranks that share it.

Every number has one owner, so weights, gradients, optimizer states, checkpoints and the gradient norm are those of any
other split parameter, and copies cannot drift apart. A rank gathers its whole head where it computes with it, and the
gradients of all who did so are summed and dealt out again (as Megatron-core does: Narayanan et al. 2021 and its
`num_query_groups < world_size`).
"""

import torch
import torch.nn.functional as F

from megatron.geometry import HeadGeometry
from megatron.mpu.groups import get_model_parallel_rank, get_model_parallel_world_size
from megatron.mpu.mappings import gather_from_sequence_parallel_region
from megatron.mpu.utils import share_sizes


def gather_kv_head(piece: torch.Tensor, geometry: HeadGeometry, dim: int = -1) -> torch.Tensor:
    """This rank's key/value head, [..., d], from each rank's piece of all heads: `mpu.shard` of [..., m·d] along dim.

    For activations (keys and values before anything needs whole heads) and for weights with one number for each of
    the m·d (a key norm over all heads). The gradient is summed over the ranks that gather the same head. Where no
    head is shared (geometry.kv_replicas is 1), the piece itself: this rank's m/p heads, [..., m/p·d].

    geometry: that of the whole layer, not of a rank.
    """
    ranks = get_model_parallel_world_size()
    replicas = geometry.kv_replicas(ranks)
    if replicas == 1:
        return piece
    sizes = [share_sizes([geometry.kv_hidden_size], rank, ranks)[0] for rank in range(ranks)]
    # One collective over the whole group: a group for each head would be one more communicator for each.
    padded = _pad(piece, dim, max(sizes) - piece.shape[dim])
    pieces = gather_from_sequence_parallel_region(padded, dim % piece.dim()).chunk(ranks, dim)
    first = get_model_parallel_rank() // replicas * replicas
    own = range(first, first + replicas)
    return torch.cat([pieces[rank].narrow(dim, 0, sizes[rank]) for rank in own], dim)


def _pad(tensor: torch.Tensor, dim: int, missing: int) -> torch.Tensor:
    """Zeros at the end of dim: a collective's pieces are of one size."""
    if missing == 0:
        return tensor
    after = tensor.dim() - 1 - dim % tensor.dim()
    return F.pad(tensor, [0, 0] * after + [0, missing])
