"""Which attention and MLP a transformer layer is made of. Transformer Engine is imported only where it is asked for."""

from megatron.model.attention import ParallelSelfAttention
from megatron.model.mlp import ParallelMLP


def attention_class(neox_args) -> type:
    """ParallelSelfAttention, or TEMultiheadAttention with te_mha."""
    if neox_args.te_mha or neox_args.te_fp8_mha:
        from megatron.model.transformer_engine import TEMultiheadAttention

        return TEMultiheadAttention
    return ParallelSelfAttention


def mlp_class(neox_args) -> type:
    """ParallelMLP, or with te_layernorm_mlp TELayerNormMLP, which has the norm before it inside."""
    if neox_args.te_layernorm_mlp:
        from megatron.model.transformer_engine import TELayerNormMLP

        return TELayerNormMLP
    return ParallelMLP
