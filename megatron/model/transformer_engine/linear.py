"""Transformer Engine's linear layers behind the interface of megatron.mpu's."""

from typing import Callable, List, Optional, Tuple

import torch

from megatron import mpu
from megatron.model.transformer_engine import api
from megatron.model.transformer_engine.common import no_init, tensor_parallel_arguments
from megatron.model.transformer_engine.extra_state import keep_extra_state_plain


class _TELinear(api.Linear):
    """A TE linear layer with one rank's share of a weight.

    TE is built with the share's own widths, which need not be equal on all ranks, and is told afterwards what is to
    be exchanged between them: `parallel_mode` "column", "row" or None.
    """

    def __init__(self, neox_args, weight: torch.nn.Parameter, bias: bool, return_bias: bool, sequence_parallel: bool):
        super().__init__(
            in_features=weight.shape[1],
            out_features=weight.shape[0],
            bias=bias,
            return_bias=return_bias,
            init_method=no_init,
            sequence_parallel=sequence_parallel,
            params_dtype=neox_args.params_dtype,
            device=mpu.current_device(),
            **tensor_parallel_arguments(),
        )
        with torch.no_grad():
            self.weight.copy_(weight)
        mpu.mark_model_parallel(self.weight, weight.partition_dim, weight.partition_groups)
        keep_extra_state_plain(self)

    def _apply_weight(self, input_: torch.Tensor) -> torch.Tensor:
        """TE's forward pass, which exchanges along dimension 0, with the sequence in dimension seq_dim."""
        if not self.sequence_parallel or self.seq_dim == 0:
            return super().forward(input_)
        output = super().forward(input_.transpose(0, self.seq_dim).contiguous())
        if isinstance(output, tuple):
            return output[0].transpose(0, self.seq_dim), output[1]
        return output.transpose(0, self.seq_dim)


class TEColumnParallelLinear(_TELinear):
    """mpu.ColumnParallelLinear, its matrix product and the exchange between the ranks done by Transformer Engine."""

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
        if gather_output and skip_bias_add:
            raise ValueError("gather_output with skip_bias_add: the gathered output and the bias shard would not fit")
        if row_groups is None and stride > 1:
            row_groups = [output_size // stride] * stride
        if row_groups is not None and sum(row_groups) != output_size:
            raise ValueError(f"row_groups={row_groups} do not add up to output_size={output_size}")
        weight = mpu.create_parameter(neox_args, (output_size, input_size), init_method, 0, row_groups)
        super().__init__(neox_args, weight, bias, skip_bias_add, sequence_parallel)
        self.parallel_mode = "column"
        self.input_size = input_size
        self.output_size = output_size
        self.output_size_per_partition = self.weight.shape[0]
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.seq_dim = seq_dim
        if bias:
            mpu.mark_model_parallel(self.bias, 0, row_groups)

    def set_parallel_output(self, parallel_output: bool):
        """Leave the output split (True) or gather it (False)."""
        self.gather_output = not parallel_output

    def forward(self, input_: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """input_ [..., in] -> (output [..., out/p] or [..., out], bias [out/p] if skip_bias_add else None)."""
        output = self._apply_weight(input_)
        if self.skip_bias_add:
            return output[0], self.bias if self.use_bias else None
        return mpu.gather_from_model_parallel_region(output) if self.gather_output else output, None


class TERowParallelLinear(_TELinear):
    """mpu.RowParallelLinear, its matrix product and the exchange between the ranks done by Transformer Engine.

    The bias is added here and not by TE: under sequence_parallel its gradient is to be summed over the ranks.
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
        if sequence_parallel and not input_is_parallel:
            raise ValueError("sequence_parallel needs input_is_parallel: the input cannot be split twice")
        weight = mpu.create_parameter(neox_args, (output_size, input_size), init_method, 1, column_groups)
        super().__init__(neox_args, weight, bias, True, sequence_parallel)
        self.input_size = input_size
        self.output_size = output_size
        self.input_size_per_partition = self.weight.shape[1]
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.seq_dim = seq_dim
        self.set_parallel_output(parallel_output)

    def set_parallel_output(self, parallel_output: bool):
        """Leave the sum over the ranks to the caller (True) or make it here (False)."""
        self.parallel_output = parallel_output
        self.parallel_mode = None if parallel_output else "row"

    def forward(self, input_: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """input_ [..., in/p] -> (output [..., out], bias [out] if skip_bias_add else None)."""
        piece = input_ if self.input_is_parallel else mpu.scatter_to_model_parallel_region(input_)
        output, _ = self._apply_weight(piece)
        bias = self.bias if self.use_bias else None
        if bias is not None and self.sequence_parallel and not self.parallel_output:
            bias = mpu.copy_weight_to_sequence_parallel_region(bias)
        if self.skip_bias_add:
            return output, bias
        return output if bias is None else output + bias, None
