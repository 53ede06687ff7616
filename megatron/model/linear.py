"""Which linear layers a model is made of: Megatron's, or Transformer Engine's behind the same interface."""

from megatron import mpu


def column_parallel(neox_args) -> type:
    """The class of the projections whose rows are split: QKV, linear1, the output layer."""
    if neox_args.te_columnparallel:
        from megatron.model.transformer_engine import TEColumnParallelLinear

        return TEColumnParallelLinear
    return mpu.ColumnParallelLinear


def row_parallel(neox_args) -> type:
    """The class of the projections whose columns are split: attention output, linear2."""
    if neox_args.te_rowparallel:
        from megatron.model.transformer_engine import TERowParallelLinear

        return TERowParallelLinear
    return mpu.RowParallelLinear
