"""Linear layers and the vocabulary embedding split over the model-parallel ranks (Shoeybi et al. 2019)."""

from typing import Callable, List, Optional, Tuple

import torch
import torch.nn.functional as F

from megatron.mpu.groups import get_model_parallel_rank, get_model_parallel_world_size
from megatron.mpu.init import create_parameter, mark_model_parallel
from megatron.mpu.mappings import (
    copy_to_model_parallel_region,
    copy_weight_to_sequence_parallel_region,
    gather_from_model_parallel_region,
    gathered_linear,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
)
from megatron.mpu.utils import current_device, divide


class ColumnParallelLinear(torch.nn.Module):
    """y = x W^T + b with the rows of W [out, in] split over the ranks: weight [out/p, in], bias [out/p].

    bias: have one; it starts at zero.
    gather_output: return all of y on each rank, else [..., out/p].
    init_method: called as init_method(tensor, generator=...) on the master weight.
    skip_bias_add: return the bias instead of adding it.
    row_groups: sizes of the blocks stacked in W's rows, each split over the ranks on its own; `stride` equal blocks
        can be written stride=n instead.
    sequence_parallel: the input is this rank's piece of the sequence (dimension seq_dim); the output has all of it.
    lora: set it to a module, input -> [..., out/p], whose output is added: see megatron/model/lora.py.
    """

    def __init__(
        self,
        neox_args,
        input_size: int,
        output_size: int,
        *,
        init_method: Callable,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        stride: int = 1,
        row_groups: Optional[List[int]] = None,
        sequence_parallel: bool = False,
        seq_dim: int = 0,
    ):
        super().__init__()
        if gather_output and skip_bias_add:
            raise ValueError("gather_output with skip_bias_add: the gathered output and the bias shard would not fit")
        if row_groups is None and stride > 1:
            row_groups = [output_size // stride] * stride
        if row_groups is not None and sum(row_groups) != output_size:
            raise ValueError(f"row_groups={row_groups} do not add up to output_size={output_size}")
        self.input_size = input_size
        self.output_size = output_size
        if row_groups is None:
            divide(output_size, get_model_parallel_world_size(), "the output width of a column-parallel layer")
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = sequence_parallel
        self.seq_dim = seq_dim
        self.weight = create_parameter(neox_args, (output_size, input_size), init_method, 0, row_groups)
        self.output_size_per_partition = self.weight.shape[0]
        self.bias = _zero_bias(neox_args, self.output_size_per_partition) if bias else None
        self.lora: Optional[torch.nn.Module] = None
        if bias:
            mark_model_parallel(self.bias, 0, row_groups)

    def set_parallel_output(self, parallel_output: bool):
        """Leave the output split (True) or gather it (False)."""
        self.gather_output = not parallel_output

    def forward(self, input_: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """input_ [..., in] -> (output [..., out/p] or [..., out], bias [out/p] if skip_bias_add else None)."""
        bias = None if self.skip_bias_add else self.bias
        if self.sequence_parallel:
            output = gathered_linear(input_, self.weight, bias, self.seq_dim)
        else:
            output = F.linear(copy_to_model_parallel_region(input_), self.weight, bias)
        if self.lora is not None:
            output = output + self.lora(input_)
        if self.gather_output:
            output = gather_from_model_parallel_region(output)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(torch.nn.Module):
    """y = x W^T + b with the columns of W [out, in] split over the ranks: weight [out, in/p], bias [out] on each rank.

    input_is_parallel: the input is [..., in/p] already; else it is [..., in] and is split here.
    column_groups: sizes of the blocks stacked in W's columns, each split over the ranks on its own.
    parallel_output: return this rank's term of the sum over the ranks; the caller reduces it. The bias, added or
        returned, then counts once for each rank.
    skip_bias_add: return the bias instead of adding it. Under sequence_parallel it comes with its gradient's sum
        over the ranks attached, so use what is returned, not `.bias`.
    sequence_parallel: the output is this rank's piece of the sequence (dimension seq_dim).
    lora: set it to a module, [..., in/p] -> this rank's term of what is added: see megatron/model/lora.py.
    """

    def __init__(
        self,
        neox_args,
        input_size: int,
        output_size: int,
        *,
        init_method: Callable,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        parallel_output: bool = False,
        column_groups: Optional[List[int]] = None,
        sequence_parallel: bool = False,
        seq_dim: int = 0,
    ):
        super().__init__()
        if sequence_parallel and not input_is_parallel:
            raise ValueError("sequence_parallel needs input_is_parallel: the input cannot be split twice")
        self.input_size = input_size
        self.output_size = output_size
        self.input_size_per_partition = divide(
            input_size, get_model_parallel_world_size(), "the input width of a row-parallel layer"
        )
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.parallel_output = parallel_output
        self.sequence_parallel = sequence_parallel
        self.seq_dim = seq_dim
        self.weight = create_parameter(neox_args, (output_size, input_size), init_method, 1, column_groups)
        self.bias = _zero_bias(neox_args, output_size) if bias else None
        self.lora: Optional[torch.nn.Module] = None

    def set_parallel_output(self, parallel_output: bool):
        """Leave the sum over the ranks to the caller (True) or make it here (False)."""
        self.parallel_output = parallel_output

    def forward(self, input_: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """input_ [..., in/p] -> (output [..., out], bias [out] if skip_bias_add else None)."""
        piece = input_ if self.input_is_parallel else scatter_to_model_parallel_region(input_)
        output = F.linear(piece, self.weight)
        if self.lora is not None:
            output = output + self.lora(piece)
        bias = self.bias
        if not self.parallel_output:
            if self.sequence_parallel:
                output = reduce_scatter_to_sequence_parallel_region(output, self.seq_dim)
                bias = None if bias is None else copy_weight_to_sequence_parallel_region(bias)
            else:
                output = reduce_from_model_parallel_region(output)
        if self.skip_bias_add:
            return output, bias
        return output if bias is None else output + bias, None


class VocabParallelEmbedding(torch.nn.Module):
    """Embedding table [vocabulary, width] with its rows split over the ranks: weight [vocabulary/p, width]."""

    def __init__(self, neox_args, num_embeddings: int, embedding_dim: int, *, init_method: Callable):
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        rows = divide(num_embeddings, get_model_parallel_world_size(), "the padded vocabulary")
        self.vocab_start_index = rows * get_model_parallel_rank()
        self.vocab_end_index = self.vocab_start_index + rows
        self.weight = create_parameter(neox_args, (num_embeddings, embedding_dim), init_method, 0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> embeddings [..., width], the same on all ranks. An id outside the vocabulary is an error."""
        if get_model_parallel_world_size() == 1:
            return F.embedding(ids, self.weight)
        rows, owned = local_rows(ids, self.vocab_start_index, self.vocab_end_index, self.num_embeddings)
        partial = F.embedding(rows, self.weight) * owned.unsqueeze(-1).to(self.weight.dtype)
        return reduce_from_model_parallel_region(partial)


def local_rows(ids: torch.Tensor, start: int, end: int, vocabulary: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """(row in this rank's shard, whether the id is this rank's) for each id.

    The row of another rank's id is 0, to be masked. An id of no rank keeps a row outside the shard, so that the
    lookup itself fails, as it does on one rank, and no check has to wait for the device.
    """
    owned = (ids >= start) & (ids < end)
    elsewhere = (ids >= 0) & (ids < vocabulary) & ~owned
    invalid = ~(owned | elsewhere)
    rows = (ids - start).masked_fill(elsewhere, 0).masked_fill(invalid, end - start)
    return rows, owned


def _zero_bias(neox_args, size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(size, dtype=neox_args.params_dtype, device=current_device()))
