"""The model as a list of layers, run by DeepSpeed's PipelineModule or one after the other.

Indices, which name the layers in checkpoints: 0 embedding, 1 [b, s, h] -> [s, b, h], 2 .. L+1 transformer layers,
L+2 back to [b, s, h], L+3 final norm, L+4 output layer (or the tied embedding again).
"""

from functools import partial
from typing import Any, Callable, List, Optional, Tuple

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from megatron import mpu
from megatron.model.init_functions import get_init_methods
from megatron.model.lora import freeze_base
from megatron.model.positional_embeddings import ParallelRelativePositionBias
from megatron.model.transformer import NormPipe, ParallelLinearPipe, ParallelTransformerLayerPipe, TiedLogits
from megatron.model.word_embeddings import EmbeddingPipe

FIRST_TRANSFORMER_LAYER = 2
"""Index of transformer layer 0 in the layer list."""

TIED_WEIGHT = "word_embeddings_weight"
"""The embedding's attribute that the tied output layer shares."""

Layers = List[Tuple[int, Callable]]


def sequence_first(hidden_states: torch.Tensor) -> torch.Tensor:
    """[b, s, h] -> [s, b, h]"""
    return hidden_states.transpose(0, 1).contiguous()


def batch_first(hidden_states: torch.Tensor) -> torch.Tensor:
    """[s, b, h] -> [b, s, h]"""
    return hidden_states.transpose(0, 1).contiguous()


class _InScope:
    """Builds a layer with weights that depend on the seed and the layer's index only, wherever it is built."""

    def in_scope(self, seed: int, index: int) -> "_InScope":
        self._scope = (seed, index)
        return self

    def build(self, log: bool = False) -> nn.Module:
        with mpu.parameter_scope(*self._scope):
            return super().build(log=log)


class _Spec(_InScope, LayerSpec):
    pass


class _TiedSpec(_InScope, TiedLayerSpec):
    pass


def layer_specs(neox_args) -> List[Any]:
    """Every layer of the model, by index: specs that build a module, and plain functions."""
    last = FIRST_TRANSFORMER_LAYER + neox_args.num_layers + 2
    rpe = _relative_position_bias(neox_args, index=last + 1)
    transformer = [
        _Spec(ParallelTransformerLayerPipe, neox_args, number, rpe=rpe).in_scope(
            neox_args.seed, FIRST_TRANSFORMER_LAYER + number
        )
        for number in range(neox_args.num_layers)
    ]
    norm = _Spec(NormPipe, neox_args).in_scope(neox_args.seed, last - 1)
    embedding, head = _embedding_and_head(neox_args, last)
    return [embedding, sequence_first, *transformer, batch_first, norm, head]


def _embedding_and_head(neox_args, last: int) -> Tuple[Any, Any]:
    init_method, _ = get_init_methods(neox_args)
    if neox_args.no_weight_tying:
        embedding = _Spec(EmbeddingPipe, neox_args, init_method).in_scope(neox_args.seed, 0)
        return embedding, _Spec(ParallelLinearPipe, neox_args).in_scope(neox_args.seed, last)
    tied = partial(_TiedSpec, "embed", EmbeddingPipe, neox_args, init_method, tied_weight_attr=TIED_WEIGHT)
    head = tied(forward_fn=TiedLogits(neox_args))
    # The last pipeline stage builds a copy of the embedding: with the first stage's scope it has the same weights.
    return tied().in_scope(neox_args.seed, 0), head.in_scope(neox_args.seed, 0)


def _relative_position_bias(neox_args, index: int):
    """The one bias module that all layers hold; None unless pos_emb is rpe. `index`, of no layer, seeds it."""
    if neox_args.pos_emb != "rpe":
        return None
    with mpu.parameter_scope(neox_args.seed, index):
        return ParallelRelativePositionBias(neox_args, neox_args.num_attention_heads)


def _checkpoint_interval(neox_args) -> int:
    """Transformer layers per activation checkpoint; 0 keeps all activations."""
    return neox_args.checkpoint_num_layers if neox_args.checkpoint_activations else 0


class CausalGPT2ModelPipe(PipelineModule):
    """GPT2ModelPipe: this rank's pipeline stage. Input (tokens [b, s], position_ids [b, s]), output what loss_fn takes:
    logits [b, s, v/p], or with fused_loss_chunk the hidden states [b, s, h] in front of the output layer, which is
    then part of loss_fn. local_layers has the output layer in either case.

    topology: DeepSpeed's, by default the one mpu was initialised with.
    """

    def __init__(self, neox_args, topology=None, parallel_output: bool = True):
        fused = neox_args.fused_loss_chunk is not None
        super().__init__(
            layers=layer_specs(neox_args),
            loss_fn=self._loss_of_hidden if fused else cross_entropy(neox_args),
            topology=topology or mpu.get_topology(),
            partition_method=neox_args.pipe_partition_method,
            activation_checkpoint_interval=_checkpoint_interval(neox_args),
            checkpointable_layers=[ParallelTransformerLayerPipe.__name__],
        )
        self._head_in_loss = fused and self._local_stop == self._num_layers
        _to_params_dtype(self, neox_args)
        freeze_base(self, neox_args)
        self._precompute_checkpointable_values()  # else forward() without an engine would run no layer at all
        self.set_parallel_output(parallel_output)

    def forward(self, inputs: Any) -> torch.Tensor:
        """See the class."""
        if not self._head_in_loss:
            return super().forward(inputs)
        head = self.forward_funcs[-1]
        self.forward_funcs[-1] = _unchanged
        try:
            return super().forward(inputs)
        finally:
            self.forward_funcs[-1] = head

    def get_tied_weights_and_groups(self) -> List[Tuple[torch.nn.Parameter, Any]]:
        """Those whose gradients DeepSpeed sums over the stages that hold them; a frozen weight has none."""
        return [(weight, group) for weight, group in super().get_tied_weights_and_groups() if weight.requires_grad]

    def _loss_of_hidden(self, hidden: torch.Tensor, targets: mpu.Targets) -> torch.Tensor:
        return self.forward_funcs[-1](hidden, targets)

    def local_layers(self) -> Layers:
        """(global index, callable) of each layer of this stage, in order."""
        return list(enumerate(self.forward_funcs, self._local_start))

    def set_parallel_output(self, parallel_output: bool) -> None:
        """Whether the logits stay split over the vocabulary; without effect on stages without the output layer."""
        _set_parallel_output(self.local_layers(), parallel_output)


def _unchanged(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


GPT2ModelPipe = CausalGPT2ModelPipe
"""GPT-NeoX's name, which the class itself must not have: DeepSpeed's engine takes a module whose class is called
GPT2ModelPipe to send an attention mask beside the hidden states, and would cut our single tensor in pieces."""


class _Function(nn.Module):
    """A function in a list of modules."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class GPT2ModelSequential(nn.Module):
    """The same layers with the same initial weights, without pipeline: state dict keys `sequential.{index}.{name}`."""

    def __init__(self, neox_args, parallel_output: bool = True):
        super().__init__()
        self.sequential = nn.ModuleList(_build_all(layer_specs(neox_args)))
        self.to(mpu.current_device())
        _to_params_dtype(self, neox_args)
        freeze_base(self, neox_args)
        self.checkpoint_interval = _checkpoint_interval(neox_args)
        self.loss_function = cross_entropy(neox_args) if neox_args.fused_loss_chunk is None else None
        self.set_parallel_output(parallel_output)

    def local_layers(self) -> Layers:
        """(index, callable) of every layer, in order."""
        return [(index, _unwrapped(layer)) for index, layer in enumerate(self.sequential)]

    def set_parallel_output(self, parallel_output: bool) -> None:
        """Whether the logits stay split over the vocabulary."""
        _set_parallel_output(self.local_layers(), parallel_output)

    def forward(self, inputs: Tuple[torch.Tensor, torch.Tensor], targets: Optional[mpu.Targets] = None) -> torch.Tensor:
        """inputs (tokens [b, s], position_ids [b, s]) -> logits [b, s, v/p], or with targets (labels [b, s], loss_mask
        [b, s]) the loss: see cross_entropy."""
        hidden = inputs
        for layers, checkpointed in self._segments():
            run = nn.Sequential(*layers)
            hidden = mpu.checkpoint(run, hidden) if checkpointed else run(hidden)
        head = self.sequential[-1]
        if targets is None:
            return head(hidden)
        return head(hidden, targets) if self.loss_function is None else self.loss_function(head(hidden), targets)

    def _segments(self) -> List[Tuple[List[nn.Module], bool]]:
        """The layers but the last, the transformer layers among them in the groups that are checkpointed as one."""
        layers = list(self.sequential)[:-1]
        if not self.checkpoint_interval or not torch.is_grad_enabled():
            return [(layers, False)]
        stop = len(layers) - 2
        groups = [
            (layers[start : min(start + self.checkpoint_interval, stop)], True)
            for start in range(FIRST_TRANSFORMER_LAYER, stop, self.checkpoint_interval)
        ]
        return [(layers[:FIRST_TRANSFORMER_LAYER], False), *groups, (layers[stop:], False)]


def _build_all(specs: List[Any]) -> List[nn.Module]:
    tied, layers = {}, []
    for spec in specs:
        if isinstance(spec, TiedLayerSpec) and spec.key in tied:
            layers.append(_Function(partial(spec.forward_fn, tied[spec.key])))
        elif isinstance(spec, LayerSpec):
            layers.append(spec.build())
            if isinstance(spec, TiedLayerSpec):
                tied[spec.key] = layers[-1]
        else:
            layers.append(_Function(spec))
    return layers


def _unwrapped(layer: nn.Module) -> Callable:
    return layer.function if isinstance(layer, _Function) else layer


def _to_params_dtype(model: nn.Module, neox_args) -> None:
    """As DeepSpeed's engine does, so that a model without engine computes the same. Buffers keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(neox_args.params_dtype)


def _set_parallel_output(layers: Layers, parallel_output: bool) -> None:
    _, head = layers[-1]
    head = head.func if isinstance(head, partial) else head
    if hasattr(head, "set_parallel_output"):
        head.set_parallel_output(parallel_output)


def build_model(neox_args, topology=None) -> nn.Module:
    """GPT2ModelPipe with pipe_parallel_size >= 1, else GPT2ModelSequential."""
    if neox_args.is_pipe_parallel:
        return GPT2ModelPipe(neox_args, topology)
    return GPT2ModelSequential(neox_args)


def cross_entropy(neox_args) -> Callable:
    """The loss: (logits [b, s, v/p], (labels [b, s], loss_mask [b, s])) -> fp32 mean over the unmasked tokens."""
    return partial(masked_cross_entropy, in_half=neox_args.fp16_lm_cross_entropy)


def masked_cross_entropy(logits: torch.Tensor, targets: mpu.Targets, in_half: bool = False) -> torch.Tensor:
    """See cross_entropy. 0 when every token is masked."""
    labels, loss_mask = targets
    losses = mpu.vocab_parallel_cross_entropy(logits, labels, in_half)  # [b, s]
    weights = loss_mask.float()
    return mpu.mean_over_tokens((losses * weights).sum(), weights)
