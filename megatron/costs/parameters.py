"""The parameters of a model, one by one: of the whole model, or of one tensor-parallel rank."""

import math
from typing import Dict, List, NamedTuple, Optional, Tuple

from megatron.neox_arguments.lora import lora_settings

_NORM_VECTORS = {"layernorm": 2, "rmsnorm": 1, "non_parametric_layernorm": 0, "te_layernorm": 2, "te_rmsnorm": 1}
"""Parameter vectors of each norm; scalenorm has a single number instead."""


class ParameterShape(NamedTuple):
    """A parameter of one rank, whether weight decay acts on it, and whether it is trained at all."""

    shape: Tuple[int, ...]
    decays: bool = True
    trains: bool = True

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


Shapes = List[ParameterShape]


def num_parameters(neox_args) -> int:
    """All parameters; a tied output layer counts once. Equals the sum of numel over the built model."""
    return sum(parameter_parts(neox_args).values())


def num_trained_parameters(neox_args) -> int:
    """Those that training changes: with `lora` the adapters', else all."""
    return num_parameters(neox_args) if neox_args.lora is None else parameter_parts(neox_args)["adapters"]


def parameter_parts(neox_args) -> Dict[str, int]:
    """Parameters by part, however the model is split: embedding, positions (learned, or rpe's biases), attention, mlp,
    norms, head, and with `lora` adapters.

    attention and mlp include biases; norms are those of the residual stream, of queries and keys, and the last one.
    A tied head is part of the embedding.
    """
    layers = range(neox_args.num_layers)
    norms = [shape for number in layers for shape in norm_shapes(neox_args, number, 1)]
    parts = {
        "embedding": count(embedding_shapes(neox_args, 1)),
        "positions": count(position_shapes(neox_args) + rpe_shapes(neox_args, 1)),
        "attention": sum(count(attention_shapes(neox_args, number, 1)) for number in layers),
        "mlp": sum(count(mlp_shapes(neox_args, number, 1)) for number in layers),
        "norms": count(norms + one_norm(neox_args, neox_args.hidden_size)),
        "head": count(head_shapes(neox_args, 1)),
    }
    if neox_args.lora is not None:
        parts["adapters"] = sum(count(adapter_shapes(neox_args, number, 1)) for number in layers)
    return parts


def count(shapes: Shapes) -> int:
    """Numbers in all of them."""
    return sum(shape.numel for shape in shapes)


def share(size: int, ranks: int) -> int:
    """What each of `ranks` ranks keeps of the rows (or columns) of a parallel layer: see megatron/mpu/layers.py.

    Of key/value heads that several ranks compute with, each keeps a share of the rows too.
    """
    return size // ranks


def layer_shapes(neox_args, number: int, ranks: int) -> Shapes:
    """Every parameter of a transformer layer on one of `ranks` ranks, without rpe's table, which layers share, and
    without adapters."""
    return [
        *attention_shapes(neox_args, number, ranks),
        *mlp_shapes(neox_args, number, ranks),
        *norm_shapes(neox_args, number, ranks),
    ]


def adapter_shapes(neox_args, number: int, ranks: int) -> Shapes:
    """A and B of each adapter of a layer, on one of `ranks` ranks: see megatron/model/lora.py."""
    found: Shapes = []
    for target in adapted(neox_args, number):
        rows, columns = (
            (target.rows, share(target.columns, ranks))
            if target.parts is None
            else (share(target.rows, ranks), target.columns)
        )
        found += [ParameterShape(((target.parts or 1) * target.rank, columns)), ParameterShape((rows, target.rank))]
    return found


class Adapted(NamedTuple):
    """A weight [rows, columns], of all ranks, with its adapter. parts: of its rows, with an A each; None where the
    ranks split its columns."""

    rows: int
    columns: int
    parts: Optional[int]
    rank: int


def adapted(neox_args, number: int) -> List[Adapted]:
    """The weights of a layer that have adapters; none without `lora`."""
    settings = lora_settings(neox_args)
    heads, mlp = neox_args.head_geometry(number), neox_args.mlp_geometry(number)
    qkv_parts = 1 + max(group.kv_parts for group in heads.groups)
    weights = {
        "query_key_value": (heads.qkv_hidden_size, heads.hidden_size, qkv_parts),
        "dense": (heads.hidden_size, heads.query_hidden_size, None),
        "linear1": (mlp.linear1_width, mlp.hidden_size, 2 if mlp.gated else 1),
        "linear2": (mlp.hidden_size, mlp.ffn_hidden_size, None),
    }
    return [Adapted(*weights[target], settings.rank) for target in settings.targets] if settings else []


def attention_shapes(neox_args, number: int, ranks: int) -> Shapes:
    """The QKV and the output projection of a layer."""
    geometry = neox_args.head_geometry(number)
    qkv, query = share(geometry.qkv_hidden_size, ranks), share(geometry.query_hidden_size, ranks)
    weights = [ParameterShape((qkv, geometry.hidden_size)), ParameterShape((geometry.hidden_size, query))]
    biases = [qkv] if neox_args.qkv_has_bias else []
    biases += [geometry.hidden_size] if neox_args.use_bias_in_attn_linear else []
    return weights + _biases(biases)


def mlp_shapes(neox_args, number: int, ranks: int) -> Shapes:
    """linear1 and linear2 of a layer."""
    mlp = neox_args.mlp_geometry(number).shard(ranks)
    weights = [
        ParameterShape((mlp.linear1_width, mlp.hidden_size)),
        ParameterShape((mlp.hidden_size, mlp.ffn_hidden_size)),
    ]
    return weights + _biases([mlp.linear1_width, mlp.hidden_size] if neox_args.use_bias_in_mlp else [])


def norm_shapes(neox_args, number: int, ranks: int) -> Shapes:
    """The norms of a layer: on the residual stream, and on queries and keys."""
    stream = 4 if neox_args.norm_placement == "sandwich" else 2
    widths = [neox_args.hidden_size] * stream + qk_norm_widths(neox_args, number, ranks)
    return [shape for width in widths for shape in one_norm(neox_args, width)]


def qk_norm_widths(neox_args, number: int, ranks: int) -> List[int]:
    """The width of the weights of each norm on queries and keys on one of `ranks` ranks; each group of heads has its
    own norms."""
    found: List[int] = []
    for group in neox_args.head_geometry(number).groups:
        query, kv = share(group.query_hidden_size, ranks), share(group.kv_hidden_size, ranks)
        widths = {"joint": [query], "per_head": [group.head_dim] * 2, "full_width": [query, kv]}
        found += widths.get(neox_args.layer_attention(number).qk_norm, [])
    return found


def one_norm(neox_args, width: int) -> Shapes:
    """A norm over `width` numbers."""
    if neox_args.norm == "scalenorm":
        return [ParameterShape((1,), False)]
    return [ParameterShape((width,), False)] * _NORM_VECTORS[neox_args.norm]


def embedding_shapes(neox_args, ranks: int) -> Shapes:
    """The token embedding."""
    return [ParameterShape((share(neox_args.padded_vocab_size, ranks), neox_args.hidden_size))]


def position_shapes(neox_args) -> Shapes:
    """Learned positions, whole on every rank."""
    if neox_args.pos_emb != "learned":
        return []
    return [ParameterShape((neox_args.max_position_embeddings, neox_args.hidden_size))]


def rpe_shapes(neox_args, ranks: int) -> Shapes:
    """The one table of relative position biases, which all layers share, as they have equally many heads."""
    if neox_args.pos_emb != "rpe":
        return []
    return [ParameterShape((neox_args.rpe_num_buckets, share(neox_args.num_attention_heads, ranks)))]


def head_shapes(neox_args, ranks: int) -> Shapes:
    """The output layer; of a tied one only the bias, if it has one."""
    rows = share(neox_args.padded_vocab_size, ranks)
    weight = [ParameterShape((rows, neox_args.hidden_size))] if neox_args.no_weight_tying else []
    return weight + _biases([rows] if neox_args.use_bias_in_output_layer else [])


def _biases(widths: List[int]) -> Shapes:
    return [ParameterShape((width,), False) for width in widths]
