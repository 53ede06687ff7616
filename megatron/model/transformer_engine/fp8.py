"""FP8 through Transformer Engine: the recipe that the te_fp8_ settings describe, and where it is in force.

te_fp8_mha switches it on, as in GPT-NeoX: for the whole transformer layer, so the products of every TE module in it
(te_mha, te_layernorm_mlp, te_columnparallel, te_rowparallel) are made in FP8. Needs a GPU of compute capability 8.9.
"""

from contextlib import ExitStack, contextmanager
from typing import Iterator

from megatron import mpu
from megatron.errors import BackendError
from megatron.model.transformer_engine import api

_FORMATS = {"e4m3": api.Format.E4M3, "hybrid": api.Format.HYBRID}


def fp8_recipe(neox_args) -> api.DelayedScaling:
    """TE's description of the FP8 arithmetic.

    Raises BackendError for weight gradients in the model's precision where the installed version has no such choice.
    """
    arguments = dict(
        margin=neox_args.te_fp8_margin,
        fp8_format=_FORMATS[neox_args.te_fp8_format],
        amax_history_len=neox_args.te_fp8_amax_history_len,
        amax_compute_algo=neox_args.te_fp8_amax_compute_algo,
        fp8_dpa=neox_args.te_fp8_mha,  # TE's fp8_mha means: no casts between the projections and this
        fp8_mha=neox_args.te_fp8_mha,
    )
    if api.accepts(api.DelayedScaling, "override_linear_precision"):
        arguments["override_linear_precision"] = (False, False, not neox_args.te_fp8_wgrad)
    elif not neox_args.te_fp8_wgrad:
        raise BackendError(
            f"te_fp8_wgrad=False: Transformer Engine {api.VERSION} computes weight gradients in FP8 whenever the rest "
            "is; remove it, or install 1.12"
        )
    return api.DelayedScaling(**arguments)


@contextmanager
def fp8_context(neox_args) -> Iterator[None]:
    """The context of a transformer layer's forward pass: FP8 if te_fp8_mha, else as it is.

    The ranges are agreed on between the model-parallel ranks. Raises BackendError where the device has no FP8.
    """
    with ExitStack() as stack:
        if neox_args.te_fp8_mha:
            group = mpu.get_model_parallel_group() if mpu.get_model_parallel_world_size() > 1 else None
            region = api.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe(neox_args), fp8_group=group)
            try:
                stack.enter_context(region)
            except AssertionError as error:
                raise BackendError(f"te_fp8_mha=True: {error} Remove it to compute in {neox_args.precision}") from error
        yield
