"""What a rank of a pipeline stage holds: its layers, and their parameters."""

import re
from dataclasses import dataclass
from typing import List

from megatron.costs import parameters
from megatron.costs.parameters import Shapes, count

FIRST_TRANSFORMER_LAYER = 2
"""Index of transformer layer 0 among the layers of the pipeline: see megatron/model/gpt2_model.py."""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: which of the model's layers it has, by their index in the pipeline's list.

    The list is: embedding, transposition, transformer layers, transposition, last norm, output layer.
    """

    number: int
    first: int
    end: int
    num_layers: int

    @property
    def layers(self) -> range:
        """Its transformer layers, 0-based."""
        start = min(max(self.first - FIRST_TRANSFORMER_LAYER, 0), self.num_layers)
        return range(start, max(start, min(self.end - FIRST_TRANSFORMER_LAYER, self.num_layers)))

    def _has(self, index: int) -> bool:
        return self.first <= index < self.end

    @property
    def has_embedding(self) -> bool:
        """The token embedding, at its beginning."""
        return self._has(0)

    @property
    def has_norm(self) -> bool:
        """The last norm."""
        return self._has(FIRST_TRANSFORMER_LAYER + self.num_layers + 1)

    @property
    def has_head(self) -> bool:
        """The output layer, and the loss."""
        return self._has(FIRST_TRANSFORMER_LAYER + self.num_layers + 2)


def stages(neox_args) -> List[Stage]:
    """All pipeline stages, one without pipeline. As pipe_partition_method deals the layers out."""
    count, layers = max(1, neox_args.pipe_parallel_size), neox_args.num_layers
    if count == 1:
        bounds = [0, layers + 5]
    else:
        bounds = _bounds(neox_args, count)
    return [Stage(i, int(bounds[i]), int(bounds[i + 1]), layers) for i in range(count)]


def stage_layers(neox_args, stage: int) -> range:
    """Numbers (0-based) of the transformer layers of a pipeline stage."""
    return stages(neox_args)[stage].layers


def _bounds(neox_args, count: int) -> List[int]:
    """DeepSpeed's own dealing out."""
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    method = neox_args.pipe_partition_method.lower()
    if method == "uniform":
        return partition_uniform(num_items=neox_args.num_layers + 5, num_parts=count)
    if method == "parameters":
        return partition_balanced(weights=_parameter_counts(neox_args), num_parts=count)
    pattern = re.compile(method.split(":")[1], re.IGNORECASE)
    weights = [int(bool(pattern.search(name))) for name in _class_names(neox_args)]
    return partition_balanced(weights=weights, num_parts=count)


def _class_names(neox_args) -> List[str]:
    middle = ["ParallelTransformerLayerPipe"] * neox_args.num_layers
    head = "ParallelLinearPipe" if neox_args.no_weight_tying else "EmbeddingPipe"
    return ["EmbeddingPipe", "sequence_first", *middle, "batch_first", "NormPipe", head]


def _parameter_counts(neox_args) -> List[int]:
    """Of each layer in the pipeline's list. Every transformer layer has rpe's table, and nothing is frozen yet, when it
    is dealt out."""
    ranks, rpe = neox_args.model_parallel_size, count(parameters.rpe_shapes(neox_args, neox_args.model_parallel_size))
    layers = [count(_transformer_layer(neox_args, number)) + rpe for number in range(neox_args.num_layers)]
    embedding, head = count(_embedding(neox_args)), count(parameters.head_shapes(neox_args, ranks))
    norm = count(parameters.one_norm(neox_args, neox_args.hidden_size))
    return [embedding, 0, *layers, 0, norm, head if neox_args.no_weight_tying else embedding]


def stage_parameters(neox_args, stage: Stage) -> Shapes:
    """Every parameter of one tensor-parallel rank of a stage. A tied embedding is on the first and the last stage. With
    `lora` only adapters are trained."""
    ranks, found = neox_args.model_parallel_size, []
    if stage.has_embedding or (stage.has_head and not neox_args.no_weight_tying):
        found += _embedding(neox_args)
    if stage.layers:
        found += parameters.rpe_shapes(neox_args, ranks)
    for number in stage.layers:
        found += parameters.layer_shapes(neox_args, number, ranks)
    if stage.has_norm:
        found += parameters.one_norm(neox_args, neox_args.hidden_size)
    if stage.has_head:
        found += parameters.head_shapes(neox_args, ranks)
    if neox_args.lora is None:
        return found
    adapters = [parameters.adapter_shapes(neox_args, number, ranks) for number in stage.layers]
    return [shape._replace(trains=False) for shape in found] + sum(adapters, [])


def _transformer_layer(neox_args, number: int) -> Shapes:
    shapes = (parameters.layer_shapes, parameters.adapter_shapes)
    return [shape for of_layer in shapes for shape in of_layer(neox_args, number, neox_args.model_parallel_size)]


def _embedding(neox_args) -> Shapes:
    """The layer at the beginning: tokens, and learned positions."""
    tokens = parameters.embedding_shapes(neox_args, neox_args.model_parallel_size)
    return tokens + parameters.position_shapes(neox_args)
