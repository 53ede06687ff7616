"""The feed-forward block of a transformer layer."""

from typing import Callable, Optional, Tuple

import torch

from megatron.model.activations import get_activation
from megatron.model.linear import column_parallel, row_parallel


class ParallelMLP(torch.nn.Module):
    """hidden -> linear1 -> activation (gated or not) -> linear2 -> hidden, sharded over the model-parallel ranks.

    All widths are those of `neox_args.mlp_geometry(layer_number)`, f being the width of one branch.
    linear1 [f or 2f, h]: a gated MLP stacks [up; gate], and each rank holds [up_r; gate_r]. linear2 [h, f].

    parallel_output: leave the sum over the ranks to the caller (gpt_j_residual sums attention and MLP first).
    """

    def __init__(
        self,
        neox_args,
        init_method: Callable,
        output_layer_init_method: Callable,
        layer_number: int = 0,
        parallel_output: bool = False,
    ):
        super().__init__()
        geometry = neox_args.mlp_geometry(layer_number)
        self.activation_func, gated = get_activation(neox_args)
        self.pieces = ("activation_func",) if gated else ()  # the others are one operation already
        if gated != geometry.gated:
            raise ValueError(f"activation={neox_args.activation!r} and {geometry} disagree on gating")
        self.linear1 = column_parallel(neox_args)(
            neox_args,
            geometry.hidden_size,
            geometry.linear1_width,
            bias=neox_args.use_bias_in_mlp,
            init_method=init_method,
            row_groups=[geometry.ffn_hidden_size] * (2 if gated else 1),
            sequence_parallel=neox_args.sequence_parallel,
        )
        self.linear2 = row_parallel(neox_args)(
            neox_args,
            geometry.ffn_hidden_size,
            geometry.hidden_size,
            bias=neox_args.use_bias_in_mlp,
            init_method=output_layer_init_method,
            skip_bias_add=True,
            parallel_output=parallel_output,
            sequence_parallel=neox_args.sequence_parallel,
        )

    def forward(self, hidden: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """hidden [s, b, h] -> (output [s, b, h], bias [h] still to be added, or None).

        Under sequence_parallel s is this rank's piece, of the input and (unless parallel_output) of the output.
        """
        branches, _ = self.linear1(hidden)  # [s, b, f/p or 2f/p]
        return self.linear2(self.activation_func(branches))  # [s, b, h]
