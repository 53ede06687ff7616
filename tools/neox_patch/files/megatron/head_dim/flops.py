"""Operations of an iteration of models whose query width is not hidden_size; megatron/logging.py counts the others."""

from megatron.head_dim.config import head_geometry
from megatron.head_dim.validation import WITHOUT_HEADS


def other_query_width(neox_args) -> bool:
    """Whether head_dim makes queries wider or narrower than hidden_size, which logging.py takes their width to be."""
    return neox_args.head_dim is not None and not head_geometry(neox_args).matches_hidden


def head_dim_flops(neox_args, recomputed: bool = False) -> float:
    """Operations of an iteration on all ranks: forward, twice that for backward, and forward again if `recomputed`.

    As logging.py counts them, but for attention, which has its true widths: MLPs are 4 * hidden_size wide, and the
    causal half of the scores is not taken off (Narayanan et al. 2021, arXiv:2104.04473, appendix). Layers without
    heads are counted there as if they had attention.
    """
    hidden_size, num_layers = neox_args.hidden_size, neox_args.num_layers
    with_heads = sum(kind not in WITHOUT_HEADS for kind in neox_args.attention_config)
    attention = with_heads * _attention(neox_args) + (num_layers - with_heads) * _attention_of_hidden(neox_args)
    mlps = num_layers * 2 * 8 * hidden_size**2
    output_layer = 1.5 * hidden_size * neox_args.padded_vocab_size
    passes = 4 if recomputed else 3
    tokens = neox_args.train_batch_size * neox_args.seq_length
    return float(passes * tokens * (attention + mlps + output_layer))


def _attention(neox_args) -> int:
    """Operations of one layer for one token, forward: two for each weight, and scores and their use."""
    geometry = head_geometry(neox_args)
    weights = geometry.hidden_size * (geometry.qkv_hidden_size + geometry.query_hidden_size)
    return 2 * weights + 4 * neox_args.seq_length * geometry.query_hidden_size


def _attention_of_hidden(neox_args) -> int:
    """The same with queries, keys and values as wide as hidden_size."""
    return 2 * 4 * neox_args.hidden_size**2 + 4 * neox_args.seq_length * neox_args.hidden_size
