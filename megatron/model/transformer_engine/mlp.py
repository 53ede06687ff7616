"""Transformer Engine's norm and MLP in one module, behind the interface of ParallelMLP."""

from typing import Callable, Dict, Optional, Tuple

import torch

from megatron import mpu
from megatron.model.transformer_engine import api
from megatron.model.transformer_engine.common import (
    exempt_from_decay,
    no_init,
    sum_gradient,
    tensor_parallel_arguments,
)
from megatron.model.transformer_engine.extra_state import keep_extra_state_plain

ACTIVATIONS: Dict[str, str] = {
    "gelu": "gelu",
    "relu": "relu",
    "geglu_tanh": "geglu",
    "reglu": "reglu",
    "swiglu": "swiglu",
}
"""Name in the config -> name of TE. TE's gelu is the tanh form: bias_gelu_fusion must be on for it."""


class TELayerNormMLP(api.LayerNormMLP):
    """norm -> fc1 -> activation -> fc2 as one module; the layer has no norm of its own before it.

    Widths, biases, eps and initial weights are those of post_attention_layernorm and ParallelMLP. The rows of a gated
    fc1 are [gate; up] on each rank, where linear1 has [up; gate].

    parallel_output: leave the sum over the ranks to the caller. TE has no such mode, so the module then computes on
    whole activations as if it were alone, and the exchange before it is made here.
    """

    def __init__(
        self,
        neox_args,
        init_method: Callable,
        output_layer_init_method: Callable,
        layer_number: int = 0,
        parallel_output: bool = False,
    ):
        geometry = neox_args.mlp_geometry(layer_number)
        is_layernorm = neox_args.norm in ("layernorm", "te_layernorm")
        super().__init__(
            hidden_size=geometry.hidden_size,
            ffn_hidden_size=geometry.ffn_hidden_size,
            eps=neox_args.layernorm_epsilon if is_layernorm else neox_args.rms_norm_epsilon,
            bias=neox_args.use_bias_in_mlp,
            normalization="LayerNorm" if is_layernorm else "RMSNorm",
            activation=ACTIVATIONS[neox_args.activation],
            init_method=no_init,
            output_layer_init_method=no_init,
            zero_centered_gamma=neox_args.zero_centered_gamma,
            return_bias=True,
            set_parallel_mode=not parallel_output,
            sequence_parallel=neox_args.sequence_parallel and not parallel_output,
            params_dtype=neox_args.params_dtype,
            device=mpu.current_device(),
            **tensor_parallel_arguments(),
        )
        self.parallel_output = parallel_output
        self.splits_sequence = neox_args.sequence_parallel
        self._set_weights(neox_args, geometry, init_method, output_layer_init_method)
        self._set_gradients()
        keep_extra_state_plain(self)

    def _set_weights(self, neox_args, geometry, init_method: Callable, output_layer_init_method: Callable) -> None:
        f, h = geometry.ffn_hidden_size, geometry.hidden_size
        blocks = [f] * (2 if geometry.gated else 1)
        linear1 = mpu.create_parameter(neox_args, (geometry.linear1_width, h), init_method, 0, blocks)
        linear2 = mpu.create_parameter(neox_args, (h, f), output_layer_init_method, 1)
        with torch.no_grad():
            self.fc1_weight.copy_(swap_branches(linear1) if geometry.gated else linear1)
            self.fc2_weight.copy_(linear2)
        mpu.mark_model_parallel(self.fc1_weight, 0, blocks)
        mpu.mark_model_parallel(self.fc2_weight, 1)
        if self.use_bias:
            mpu.mark_model_parallel(self.fc1_bias, 0, blocks)
            exempt_from_decay(self.fc1_bias, self.fc2_bias)

    def _set_gradients(self) -> None:
        norm = [self.layer_norm_weight, *([] if self.layer_norm_bias is None else [self.layer_norm_bias])]
        exempt_from_decay(*norm)
        if self.splits_sequence or self.parallel_output:
            for parameter in norm:
                sum_gradient(parameter)

    def forward(self, hidden: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """hidden [s, b, h], before the norm -> (output [s, b, h], bias [h] still to be added, or None).

        Under sequence_parallel s is this rank's piece, of the input and (unless parallel_output) of the output.
        """
        bias = self.fc2_bias if self.use_bias else None
        if self.parallel_output:
            whole = self._whole(hidden)
            return super().forward(whole)[0], bias
        if bias is not None and self.splits_sequence:
            bias = mpu.copy_weight_to_sequence_parallel_region(bias)
        return super().forward(hidden)[0], bias

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """All tokens, the gradient of which is to be summed over the ranks."""
        if self.splits_sequence:
            return mpu.gather_from_sequence_parallel_region(hidden)
        return mpu.copy_to_model_parallel_region(hidden)


def swap_branches(rows: torch.Tensor) -> torch.Tensor:
    """[up; gate] (linear1) to [gate; up] (fc1), or back; of one rank's rows or of all."""
    first, second = rows.chunk(2, dim=0)
    return torch.cat([second, first])
