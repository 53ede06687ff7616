"""What is wrong with settings of the Transformer Engine path (te_*). Each check yields messages.

Only what no version of Transformer Engine can do, or what we do not ask of it, is refused here, without importing it.
What depends on the installed version is a BackendError when the model is built.
"""

from typing import Any, Iterator

from megatron.neox_arguments import validate_model
from megatron.neox_arguments.layer_attention import layer_attention

_OWN = "set te_mha: false (and te_fp8_mha: false)"


def _attention(settings: Any) -> Iterator[str]:
    name = "te_mha" if settings.te_mha else "te_fp8_mha"
    if not (settings.te_mha or settings.te_fp8_mha):
        return
    for setting, reason in _ATTENTION_REFUSALS:
        value = getattr(settings, setting)
        if value not in (None, False) and (setting != "pos_emb" or value in ("alibi", "rpe")):
            yield f"{setting}={value}: {name}=True {reason}; remove it, or {_OWN}"
    explicit = [kind for kind in settings.attention_config if kind != "auto"]
    if explicit:
        yield (
            f"attention_config={explicit[0]}: with {name}=True Transformer Engine picks its kernel itself; remove "
            f"attention_config, or {_OWN}"
        )
    yield from _attention_ranks(settings, name)
    yield from _attention_rotary(settings, name)


_ATTENTION_REFUSALS = (
    ("pos_emb", "adds no bias to the scores here, which alibi and rpe need"),
    ("use_qk_layernorm", "has no norm on queries and keys"),
    ("qk_norm_type", "has no norm on queries and keys"),
    ("apply_query_key_layer_scaling", "does the softmax in fp32 and needs no smaller scores"),
    ("rotary_save_freqs_buffer", "keeps no buffer of rotary frequencies"),
    ("kv_cache_dtype", "keeps its own key/value cache, in the model's precision"),
)
"""(setting, why it does not go with Transformer Engine's attention), for any value but null and false."""


def _attention_ranks(settings: Any, name: str) -> Iterator[str]:
    kv_heads, ranks = settings.num_kv_heads or settings.num_attention_heads, settings.model_parallel_size
    if kv_heads is not None and kv_heads > 0 and ranks > 0 and kv_heads % ranks:
        yield (
            f"num_kv_heads={kv_heads} does not divide by model_parallel_size={ranks}: {name}=True cannot share a "
            f"key/value head between ranks; lower model_parallel_size, or {_OWN}"
        )


def _attention_rotary(settings: Any, name: str) -> Iterator[str]:
    """Transformer Engine takes one table of angles for texts of all lengths."""
    if any(list(check(settings)) for check in validate_model.CHECKS):
        return  # without a sound model there are no tables
    for rotary in dict.fromkeys(layer_attention(settings, number).rotary for number in range(settings.num_layers)):
        scaling = None if rotary is None else rotary.scaling
        if scaling is None:
            continue
        threshold = scaling.length_threshold
        if threshold is not None and rotary.positions > threshold:
            yield (
                f"rope_scaling of type {scaling.rope_type} has other frequencies for texts of more than {threshold} "
                f"tokens, and {name}=True one table for all up to seq_length={rotary.positions}; {_OWN}"
            )
        if scaling.attention_factor != 1.0 and settings.rotary_pct != 1.0:
            yield (
                f"rope_scaling of type {scaling.rope_type} multiplies the rotated dimensions by "
                f"{scaling.attention_factor:g}, which {name}=True can only do with rotary_pct=1.0, not "
                f"{settings.rotary_pct}; {_OWN}"
            )


CHECKS = (_attention,)
