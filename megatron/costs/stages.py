"""What a rank of a pipeline stage holds: its layers, and its parameters one by one."""

import math
import re
from dataclasses import dataclass
from typing import List, NamedTuple, Tuple

FIRST_TRANSFORMER_LAYER = 2
"""Index of transformer layer 0 among the layers of the pipeline: see megatron/model/gpt2_model.py."""


class ParameterShape(NamedTuple):
    """A parameter of one rank, and whether weight decay acts on it."""

    shape: Tuple[int, ...]
    decays: bool = True

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


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
    def count(shapes):
        return sum(shape.numel for shape in shapes)

    layers = [
        count(layer_parameters(neox_args, number)) + count(_rpe(neox_args)) for number in range(neox_args.num_layers)
    ]
    embedding = count(_embedding(neox_args))
    head = count(_head(neox_args)) if neox_args.no_weight_tying else embedding
    return [embedding, 0, *layers, 0, count(_norm(neox_args, neox_args.hidden_size)), head]


def stage_parameters(neox_args, stage: Stage) -> List[ParameterShape]:
    """Every parameter of one tensor-parallel rank of a stage. A tied embedding is on the first and the last stage."""
    found: List[ParameterShape] = []
    tied_head = stage.has_head and not neox_args.no_weight_tying
    if stage.has_embedding or tied_head:
        found += _embedding(neox_args)
    if stage.layers:
        found += _rpe(neox_args)
    for number in stage.layers:
        found += layer_parameters(neox_args, number)
    if stage.has_norm:
        found += _norm(neox_args, neox_args.hidden_size)
    if stage.has_head and not tied_head:
        found += _head(neox_args)
    return found


def layer_parameters(neox_args, number: int) -> List[ParameterShape]:
    """Every parameter of a transformer layer on one tensor-parallel rank, without rpe's table, which layers share."""
    ranks, hidden = neox_args.model_parallel_size, neox_args.hidden_size
    geometry, mlp = neox_args.head_geometry(number), neox_args.mlp_geometry(number)
    qkv, query = geometry.qkv_hidden_size // ranks, geometry.query_hidden_size // ranks
    wide, narrow = mlp.linear1_width // ranks, mlp.ffn_hidden_size // ranks
    found = [ParameterShape(shape) for shape in ((qkv, hidden), (hidden, query), (wide, hidden), (hidden, narrow))]
    biases = [qkv] if neox_args.qkv_has_bias else []
    biases += [hidden] if neox_args.use_bias_in_attn_linear else []
    biases += [wide, hidden] if neox_args.use_bias_in_mlp else []
    found += [ParameterShape((width,), False) for width in biases]
    for _ in range(4 if neox_args.norm_placement == "sandwich" else 2):
        found += _norm(neox_args, hidden)
    for width in qk_norm_widths(neox_args, number):
        found += _norm(neox_args, width)
    return found


def qk_norm_widths(neox_args, number: int) -> List[int]:
    """The width of the weights of each norm on queries and keys, on one tensor-parallel rank."""
    geometry, ranks = neox_args.head_geometry(number), neox_args.model_parallel_size
    widths = {
        "joint": [geometry.query_hidden_size // ranks],
        "per_head": [geometry.head_dim] * 2,
        "full_width": [geometry.query_hidden_size // ranks, geometry.kv_hidden_size // ranks],
    }
    return widths.get(neox_args.layer_attention(number).qk_norm, [])


def _norm(neox_args, width: int) -> List[ParameterShape]:
    if neox_args.norm == "scalenorm":
        return [ParameterShape((1,), False)]
    vectors = {"non_parametric_layernorm": 0, "rmsnorm": 1, "te_rmsnorm": 1}.get(neox_args.norm, 2)
    return [ParameterShape((width,), False)] * vectors


def _embedding(neox_args) -> List[ParameterShape]:
    rows = neox_args.padded_vocab_size // neox_args.model_parallel_size
    found = [ParameterShape((rows, neox_args.hidden_size))]
    if neox_args.pos_emb == "learned":
        found.append(ParameterShape((neox_args.max_position_embeddings, neox_args.hidden_size)))
    return found


def _rpe(neox_args) -> List[ParameterShape]:
    if neox_args.pos_emb != "rpe":
        return []
    heads = neox_args.head_geometry().shard(neox_args.model_parallel_size).num_attention_heads
    return [ParameterShape((neox_args.rpe_num_buckets, heads))]


def _head(neox_args) -> List[ParameterShape]:
    rows = neox_args.padded_vocab_size // neox_args.model_parallel_size
    bias = [ParameterShape((rows,), False)] if neox_args.use_bias_in_output_layer else []
    return [ParameterShape((rows, neox_args.hidden_size)), *bias]
