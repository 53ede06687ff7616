"""The transformer layer and the modules of the pipeline that wrap it: final norm and output layer.

Hidden states are [s, b, h] inside the layers and [b, s, h] outside of them.
"""

from contextlib import nullcontext
from functools import partial
from typing import Callable, ContextManager, Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron import mpu
from megatron.model.attention import LayerKVCache
from megatron.model.compiling import compile_pieces, wants_compile
from megatron.model.init_functions import get_init_methods
from megatron.model.linear import column_parallel
from megatron.model.lora import add_adapters
from megatron.model.norms import get_norm
from megatron.model.parts import attention_class, mlp_class
from megatron.model.positional_embeddings import ParallelRelativePositionBias
from megatron.neox_arguments.support import TE_LAYERS


class ParallelTransformerLayer(nn.Module):
    """Attention and MLP in one of GPT-NeoX's residual forms.

    normal:          y = x + attention(norm1(x));  y + mlp(norm2(y))
    gpt_j_residual:  x + attention(norm1(x)) + mlp(norm2(x)), with one reduction over the model-parallel ranks
    gpt_j_tied:      the same with norm1 before both; norm2 exists, because checkpoints have it, and is unused

    norm_placement says where the normal form has its norms; each of these four exists only where it acts:

    pre:      input_layernorm before the attention, post_attention_layernorm before the MLP
    post:     attention_output_layernorm and mlp_output_layernorm on what the two give, with its bias, before dropout
              and the residual sum: y = x + norm(attention(x)) (OLMo 2, arXiv:2501.00656, section 3.2)
    sandwich: all four (Gemma 2, arXiv:2408.00118, section 2)

    layer_scalar: the sum is multiplied by one number, a buffer [1] that is not trained (Gemma 4).

    layer_number is 0-based. Biases are optional in each part, and hidden dropout acts with or without them.

    Under gpt_j_residual each rank adds its own copy of the two row-parallel biases before the reduction, so the bias
    that acts is the *sum* of the copies. Checkpoints of GPT-NeoX hold copies that differ. Biases start at zero.
    """

    def __init__(
        self,
        neox_args,
        layer_number: int,
        init_method=None,
        output_layer_init_method=None,
        rpe: Optional[ParallelRelativePositionBias] = None,
    ):
        super().__init__()
        default_init, default_output_init = get_init_methods(neox_args)
        init_method = init_method or default_init
        output_layer_init_method = output_layer_init_method or default_output_init
        self.layer_number = layer_number
        self.hidden_dropout = neox_args.hidden_dropout
        self.gpt_j_residual = neox_args.gpt_j_residual
        self.gpt_j_tied = neox_args.gpt_j_tied
        self.sequence_parallel = neox_args.sequence_parallel
        self.fp8_context = _fp8_context(neox_args)
        norm = _norm_factory(neox_args)
        norms_inputs = neox_args.norm_placement in ("pre", "sandwich")
        norms_outputs = neox_args.norm_placement in ("sandwich", "post")
        self.input_layernorm = norm() if norms_inputs else None
        self.attention = attention_class(neox_args)(
            neox_args, layer_number, init_method, output_layer_init_method, rpe, parallel_output=self.gpt_j_residual
        )
        self.attention_output_layernorm = norm() if norms_outputs else None
        # With te_layernorm_mlp this norm is inside the MLP.
        self.post_attention_layernorm = norm() if norms_inputs and not neox_args.te_layernorm_mlp else None
        self.mlp = mlp_class(neox_args)(
            neox_args,
            init_method,
            output_layer_init_method,
            layer_number=layer_number,
            parallel_output=self.gpt_j_residual,
        )
        self.mlp_output_layernorm = norm() if norms_outputs else None
        scalar = torch.ones(1, dtype=neox_args.params_dtype) if neox_args.layer_scalar else None
        self.register_buffer("layer_scalar", scalar)
        add_adapters(self, neox_args)
        if wants_compile(neox_args):
            compile_pieces(self)

    def forward(self, hidden_states: torch.Tensor, kv_cache: Optional[LayerKVCache] = None) -> torch.Tensor:
        """hidden_states [s, b, h] -> [s, b, h]; with a cache, s new tokens behind the cached ones."""
        with self.fp8_context():
            residual = self._parallel_residual if self.gpt_j_residual else self._normal_residual
            return self.scaled(residual(hidden_states, kv_cache))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, with layer_scalar."""
        return x if self.layer_scalar is None else x * self.layer_scalar

    def _normal_residual(self, x: torch.Tensor, kv_cache: Optional[LayerKVCache]) -> torch.Tensor:
        branch = self.attention(_normed(self.input_layernorm, x), kv_cache)
        x = x + self._bias_norm_dropout(*branch, self.attention_output_layernorm)
        branch = self.mlp(_normed(self.post_attention_layernorm, x))
        return x + self._bias_norm_dropout(*branch, self.mlp_output_layernorm)

    def _parallel_residual(self, x: torch.Tensor, kv_cache: Optional[LayerKVCache]) -> torch.Tensor:
        attention_input = self.input_layernorm(x)
        mlp_input = attention_input if self.gpt_j_tied else _normed(self.post_attention_layernorm, x)
        branches = self._bias_norm_dropout(*self.attention(attention_input, kv_cache))
        branches = branches + self._bias_norm_dropout(*self.mlp(mlp_input))
        return x + self._reduce(branches)

    def _reduce(self, branches: torch.Tensor) -> torch.Tensor:
        """Sum over the model-parallel ranks; under sequence_parallel each keeps its part of the sequence."""
        if self.sequence_parallel:
            return mpu.reduce_scatter_to_sequence_parallel_region(branches)
        return mpu.reduce_from_model_parallel_region(branches)

    def _bias_norm_dropout(
        self, output: torch.Tensor, bias: Optional[torch.Tensor], norm: Optional[nn.Module] = None
    ) -> torch.Tensor:
        """What a sublayer adds to the residual stream: its output with bias, norm and dropout."""
        if bias is not None:
            output = output + bias
        output = _normed(norm, output)
        if self.hidden_dropout == 0.0 or not self.training:
            return output
        if self.sequence_parallel and not self.gpt_j_residual:
            # Each rank holds other tokens. Otherwise all hold terms of one sum, and must drop the same elements.
            with mpu.get_cuda_rng_tracker().fork():
                return F.dropout(output, self.hidden_dropout)
        return F.dropout(output, self.hidden_dropout)


def _norm_factory(neox_args) -> Callable[[], nn.Module]:
    """Makes norms over the residual stream."""
    norm, eps = get_norm(neox_args)
    return partial(norm, neox_args.hidden_size, eps, neox_args.sequence_parallel)


def _normed(norm: Optional[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


def _fp8_context(neox_args) -> Callable[[], ContextManager]:
    """Makes the context that a layer's forward pass runs in. Transformer Engine decides; without it there is none."""
    if not any(getattr(neox_args, name) for name in TE_LAYERS):
        return nullcontext
    from megatron.model.transformer_engine import fp8_context

    return partial(fp8_context, neox_args)


class ParallelTransformerLayerPipe(ParallelTransformerLayer):
    """The layer under the name by which DeepSpeed's pipe_partition_method and checkpointing find it."""


class NormPipe(nn.Module):
    """The final norm, [b, s, h] -> [b, s, h]."""

    def __init__(self, neox_args):
        super().__init__()
        self.norm = _norm_factory(neox_args)()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden_states)


def soft_cap(logits: torch.Tensor, cap: Optional[float]) -> torch.Tensor:
    """cap * tanh(logits / cap), which stays within -cap and cap (Gemma 2, section 2); without a cap the logits."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def fused_loss(neox_args) -> Optional[mpu.FusedLinearCrossEntropy]:
    """The loss that the output layer computes itself with fused_loss_chunk, chunk by chunk; None without."""
    if neox_args.fused_loss_chunk is None:
        return None
    return mpu.FusedLinearCrossEntropy(neox_args.fused_loss_chunk, neox_args.final_logit_softcap)


class ParallelLinearPipe(nn.Module):
    """The output layer with weights of its own: [b, s, h] -> logits [b, s, v/p], or [b, s, v] when gathered.

    final_logit_softcap acts on the logits of either kind, so the loss and generation see the same.
    With fused_loss_chunk and targets it gives the loss: see fused_loss.
    """

    def __init__(self, neox_args, init_method=None, parallel_output: bool = True):
        super().__init__()
        loss = fused_loss(neox_args)
        linear = column_parallel(neox_args) if loss is None else partial(mpu.FusedLossLinear, loss=loss)
        self.final_linear = linear(
            neox_args,
            neox_args.hidden_size,
            neox_args.padded_vocab_size,
            bias=neox_args.use_bias_in_output_layer,
            init_method=init_method or get_init_methods(neox_args)[0],
            gather_output=not parallel_output,
            sequence_parallel=neox_args.sequence_parallel,
            seq_dim=1,
        )
        self.softcap = neox_args.final_logit_softcap

    def set_parallel_output(self, parallel_output: bool) -> None:
        """Whether the logits stay split over the vocabulary (training) or are gathered (generation)."""
        self.final_linear.set_parallel_output(parallel_output)

    def forward(self, hidden_states: torch.Tensor, targets: Optional[mpu.Targets] = None) -> torch.Tensor:
        if targets is not None:
            return self.final_linear(hidden_states, targets)[0]
        logits, _ = self.final_linear(hidden_states)
        return soft_cap(logits, self.softcap)


class TiedLogits:
    """The output layer that shares the word embedding's weight: (embedding, hidden [b, s, h]) -> logits [b, s, v/p].

    A plain callable: its weight belongs to the embedding, in the state dict too. embedding_multiplier is no part of
    that weight, so it does not act here; final_logit_softcap does. With fused_loss_chunk and targets it gives the loss.
    """

    def __init__(self, neox_args, parallel_output: bool = True):
        self.sequence_parallel = neox_args.sequence_parallel
        self.softcap = neox_args.final_logit_softcap
        self.loss = fused_loss(neox_args)
        self.parallel_output = parallel_output

    def set_parallel_output(self, parallel_output: bool) -> None:
        """As ParallelLinearPipe.set_parallel_output."""
        self.parallel_output = parallel_output

    def __call__(
        self, embedding: nn.Module, hidden_states: torch.Tensor, targets: Optional[mpu.Targets] = None
    ) -> torch.Tensor:
        if self.sequence_parallel:
            hidden_states = mpu.gather_from_sequence_parallel_region(hidden_states, seq_dim=1)
        else:
            hidden_states = mpu.copy_to_model_parallel_region(hidden_states)
        if targets is not None:
            return self.loss(hidden_states, embedding.word_embeddings_weight, None, targets)
        logits = soft_cap(F.linear(hidden_states, embedding.word_embeddings_weight), self.softcap)
        return logits if self.parallel_output else mpu.gather_from_model_parallel_region(logits)
