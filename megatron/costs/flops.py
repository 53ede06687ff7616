"""Floating-point operations of a training step."""

from megatron.costs.parameters import layer_matrices


def flops_per_token(neox_args, seq_length: int | None = None) -> float:
    """Floating-point operations per token of a training step, forward and backward, at `seq_length` tokens.

    6 per matrix parameter (2 forward, 4 backward; the output layer counts, the embedding lookup does not) plus
    12 * query width * seq_length per layer for scores and their use; the causal half is not taken off. As Narayanan
    et al. 2021 (arXiv:2104.04473, appendix) and Chowdhery et al. 2022 (PaLM, appendix B) count, with the true
    projection widths. Recomputed activations do not count: these are the model's operations, not the hardware's.
    """
    seq_length = neox_args.seq_length if seq_length is None else seq_length
    head = neox_args.padded_vocab_size * neox_args.hidden_size
    total = 6.0 * head
    for number in range(neox_args.num_layers):
        query_width = neox_args.head_geometry(number).query_hidden_size
        total += 6.0 * layer_matrices(neox_args, number) + 12.0 * query_width * seq_length
    return total
