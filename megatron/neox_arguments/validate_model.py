"""What is wrong with the model's settings. Each check yields messages."""

from typing import Any, Dict, Iterable, Iterator, List, Tuple

from megatron.errors import ConfigError
from megatron.neox_arguments.layer_attention import rope_scaling_of_layer_type
from megatron.neox_arguments.layer_types import LAYER_TYPES, is_by_layer_type
from megatron.neox_arguments.per_layer import MAX_LAYERS, count_problem, layers_text
from megatron.neox_arguments.support import ATTENTION_KINDS, BUILT_ATTENTION_KINDS
from megatron.neox_arguments.widths import is_per_layer, layers_by_geometry, mixed_layers, mlp_geometry, named_layers

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings")


def _required(settings: Any) -> Iterator[str]:
    for name in _REQUIRED:
        if getattr(settings, name) is None:
            yield f"{name} is not set; it has no default"
    if (settings.num_layers or 0) > MAX_LAYERS:
        yield f"num_layers={settings.num_layers} is more than {MAX_LAYERS}, the most that is supported"
    if settings.seq_length is not None and settings.max_position_embeddings is not None:
        if settings.max_position_embeddings < settings.seq_length:
            yield (
                f"max_position_embeddings={settings.max_position_embeddings} is less than "
                f"seq_length={settings.seq_length}; it must be at least as large"
            )


def _head_widths(settings: Any) -> Iterator[str]:
    numbers = (settings.hidden_size, settings.num_attention_heads, settings.num_kv_heads, settings.head_dim)
    if None in numbers[:2] or any(type(number) is int and number <= 0 for number in numbers):
        return
    if "mamba" in settings.attention_config:  # refused elsewhere; in its configs the number of heads means nothing
        return
    if any(map(is_per_layer, numbers)) and not 0 < (settings.num_layers or 0) <= MAX_LAYERS:
        return
    try:
        layers = layers_by_geometry(settings)
    except ConfigError as error:
        yield from error.problems
        return
    if settings.model_parallel_size > 0:
        problems: Dict[str, List[int]] = {}
        for geometry, numbers in layers.items():
            for problem in geometry.shard_problems(settings.model_parallel_size):
                problems.setdefault(problem, []).extend(numbers)
        yield from named_layers(problems, settings.num_layers)
    mixed = mixed_layers(settings)
    if mixed and settings.pos_emb == "rpe" and settings.model_parallel_size > 1:
        yield (
            f"pos_emb=rpe: model_parallel_size={settings.model_parallel_size} splits the table that all layers share "
            f"by heads, and {layers_text(mixed)} have theirs in groups (head_dim={settings.head_dim}); use "
            "model_parallel_size 1, or another pos_emb"
        )


def _mlp_width(settings: Any) -> Iterator[str]:
    given = (settings.ffn_hidden_size, settings.intermediate_size, settings.expansion_factor, settings.mlp_multiple_of)
    if settings.hidden_size is None or any(number is not None and number <= 0 for number in given):
        return
    try:
        geometry = mlp_geometry(settings)
    except ConfigError as error:
        yield from error.problems
        return
    if settings.intermediate_size is not None and settings.expansion_factor is not None:
        yield (
            f"intermediate_size={settings.intermediate_size} and expansion_factor={settings.expansion_factor} both "
            "give the MLP width; keep one"
        )
    if settings.ffn_hidden_size is not None and settings.ffn_hidden_size % settings.mlp_multiple_of:
        yield (
            f"ffn_hidden_size={settings.ffn_hidden_size} is the exact MLP width, but not a multiple of "
            f"mlp_multiple_of={settings.mlp_multiple_of}; change or remove one"
        )
    if geometry.ffn_hidden_size <= 0:
        yield f"the MLP would be {geometry.ffn_hidden_size} wide; set ffn_hidden_size or a larger intermediate_size"
    elif settings.model_parallel_size > 0:
        yield from geometry.shard_problems(settings.model_parallel_size)


def _attention_kinds(settings: Any) -> Iterator[str]:
    config = settings.attention_config
    odd = [kind for kind in config if not isinstance(kind, str)]
    if odd:
        yield (
            f"attention_config holds {odd[0]!r}; write one kind for each layer, or pairs of a pattern and a count "
            'such as [[["flash"], 12]] or [[["global", "flash"], "all"]]'
        )
        return
    for kind in dict.fromkeys(config):
        if kind not in ATTENTION_KINDS:
            yield f"attention_config={kind!r} is not a kind of attention; use one of {', '.join(BUILT_ATTENTION_KINDS)}"
    if settings.num_layers is not None and len(config) != max(settings.num_layers, 0):
        yield (
            f"attention_config describes {len(config)} layers and num_layers={settings.num_layers}; a pattern with "
            '"all" must fit a whole number of times, other counts must add up'
        )


def _layer_types(settings: Any) -> Iterator[str]:
    types, window = settings.layer_types, settings.sliding_window_width
    odd = [layer_type for layer_type in types if layer_type not in LAYER_TYPES]
    if odd:
        yield (
            f"layer_types holds {odd[0]!r}; write {' or '.join(LAYER_TYPES)} for each layer, or pairs of a pattern and "
            'a count such as [[["sliding_attention", "full_attention"], "all"]]'
        )
        return
    problem = None if settings.num_layers is None else count_problem("layer_types", types, max(settings.num_layers, 0))
    if problem:
        yield problem
    if "sliding_attention" in types and window is None:
        yield "layer_types has sliding_attention layers, which need sliding_window_width"
    if window is not None and types and "sliding_attention" not in types:
        yield f"sliding_window_width={window} is used by no layer: layer_types has no sliding_attention; remove one"


def _no_rope_layers(settings: Any) -> Iterator[str]:
    flags = settings.no_rope_layers
    if flags is None:
        return
    if settings.pos_emb != "rotary":
        yield f"no_rope_layers={flags} is only used with pos_emb=rotary, not {settings.pos_emb}; remove it"
    elif not all(type(flag) in (int, bool) and flag in (0, 1) for flag in flags):
        yield f"no_rope_layers={flags} must be a list of 1 (rotary positions) and 0 (none), one for each layer"
    elif settings.num_layers is not None and len(flags) != max(settings.num_layers, 0):
        yield f"no_rope_layers has {len(flags)} entries and num_layers={settings.num_layers}; they must be as many"


def _rotary(settings: Any) -> Iterator[str]:
    types = dict.fromkeys(layer_type for layer_type in settings.layer_types if layer_type in LAYER_TYPES)
    odd_bases = list(_rotary_bases(settings.rotary_emb_base, types))
    yield from odd_bases
    stretch = settings.rotary_denominator_scale
    if stretch is not None and settings.pos_emb != "rotary":
        yield f"rotary_denominator_scale={stretch} is only used with pos_emb=rotary, not {settings.pos_emb}; remove it"
    scaling = settings.rope_scaling
    if scaling is None:
        return
    if settings.pos_emb != "rotary":
        yield f"rope_scaling={scaling} is only used with pos_emb=rotary, not {settings.pos_emb}; remove it"
        return
    if odd_bases or list(_required(settings)) or list(_head_widths(settings)):
        return  # reported already
    if not is_by_layer_type(scaling) and set(scaling) & set(LAYER_TYPES):
        yield (
            f"rope_scaling={scaling} names layer types beside other keys; map {' and '.join(LAYER_TYPES)} to a scaling "
            "each, and nothing else"
        )
        return
    yield from _rotary_scalings(settings, list(scaling) if is_by_layer_type(scaling) else types)


def _rotary_scalings(settings: Any, layer_types: Iterable[str]) -> Iterator[str]:
    problems: Dict[str, None] = {}
    for layer_type, ndims in _rotated_kinds(settings, layer_types):
        try:
            scaling = rope_scaling_of_layer_type(settings, ndims, layer_type)
        except ConfigError as error:
            problems.update(dict.fromkeys(error.problems))  # one scaling for all types is wrong once
            continue
        threshold = None if scaling is None else scaling.length_threshold
        if settings.prefill_chunk_size and threshold is not None and threshold < settings.seq_length:
            problems[
                f"prefill_chunk_size={settings.prefill_chunk_size} with rope_scaling of type {scaling.rope_type}: the "
                f"pieces of a prompt beyond {threshold} tokens would be rotated by different frequencies; remove "
                "prefill_chunk_size"
            ] = None
    yield from problems


def _rotated_kinds(settings: Any, layer_types: Iterable[str]) -> Iterator[Tuple[str, int]]:
    """(layer type, rotary_ndims) of the layers; a type that no layer has goes with the widths of all layers."""
    found, types = layers_by_geometry(settings), dict(enumerate(settings.layer_types))
    for layer_type in layer_types:
        of_type = [each for each, numbers in found.items() if layer_type in map(types.get, numbers)]
        ndims = {part.rotary_ndims for geometry in of_type or found for part in geometry.groups}
        yield from ((layer_type, each) for each in sorted(ndims))


def _rotary_bases(bases: Any, layer_types: Iterable[str]) -> Iterator[str]:
    by_type = bases if is_by_layer_type(bases) else {layer_type: bases for layer_type in layer_types}
    missing = [layer_type for layer_type in layer_types if layer_type not in by_type]
    odd = [base for base in by_type.values() if type(base) not in (int, float) or not 0 < base < float("inf")]
    if missing or odd:
        yield (
            f"rotary_emb_base={bases} must be a number greater than 0, or map each of the model's layer types "
            f"({', '.join(LAYER_TYPES)}) to one"
        )


def _positions(settings: Any) -> Iterator[str]:
    if settings.pos_emb == "rpe" and settings.pipe_parallel_size >= 2:
        yield (
            f"pos_emb=rpe shares one table between all layers, so pipe_parallel_size={settings.pipe_parallel_size} "
            "cannot hold it; use pipe_parallel_size 0 or 1"
        )
    for kind in ("flash", "chunked"):
        if settings.pos_emb in ("rpe", "alibi") and kind in settings.attention_config:
            yield (
                f"pos_emb={settings.pos_emb} adds a bias to the attention scores, which {kind} attention does not "
                "take; use attention_config global"
            )
    if settings.opt_pos_emb_offset and settings.pos_emb != "learned":
        yield f"opt_pos_emb_offset={settings.opt_pos_emb_offset} is only used with pos_emb=learned; remove it"


def _blocks(settings: Any) -> Iterator[str]:
    if settings.gpt_j_tied and not settings.gpt_j_residual:
        yield "gpt_j_tied=True shares the norm of a parallel residual, so it needs gpt_j_residual=True"
    if settings.norm_placement != "pre" and settings.gpt_j_residual:
        yield (
            f"norm_placement={settings.norm_placement} norms each sublayer's output, and gpt_j_residual=True sums both "
            "before they are complete; set one of them back"
        )
    if settings.norm_placement == "post" and settings.te_layernorm_mlp:
        yield (
            "te_layernorm_mlp=True has a norm before the MLP inside it, which norm_placement=post has not; remove "
            "te_layernorm_mlp or use norm_placement sandwich or pre"
        )
    if settings.zero_centered_gamma and settings.norm not in ("layernorm", "rmsnorm", "te_layernorm", "te_rmsnorm"):
        yield f"zero_centered_gamma=True has no weight to act on in norm={settings.norm}; use layernorm or rmsnorm"
    if settings.add_qkv_bias and settings.use_bias_in_attn_linear:
        yield (
            "add_qkv_bias=True: use_bias_in_attn_linear=True gives QKV and output projection a bias already; set it to "
            "false for a bias in QKV only, or remove add_qkv_bias"
        )
    if settings.use_bias_in_output_layer and not settings.no_weight_tying:
        yield (
            "use_bias_in_output_layer=True needs no_weight_tying=True: an output layer that is the embedding has no "
            "parameters of its own"
        )
    if settings.fp16_lm_cross_entropy and settings.precision != "fp16":
        yield f"fp16_lm_cross_entropy=True needs precision=fp16, not {settings.precision}"


def _fused_loss(settings: Any) -> Iterator[str]:
    chunk = settings.fused_loss_chunk
    if chunk is not None and settings.fp16_lm_cross_entropy:
        yield (
            f"fused_loss_chunk={chunk} takes the softmax in fp32, and fp16_lm_cross_entropy=True asks for one in fp16; "
            "remove one of the two"
        )
    if chunk is not None and settings.te_columnparallel:
        yield (
            f"fused_loss_chunk={chunk} computes the output layer itself, which te_columnparallel=True leaves to "
            "Transformer Engine; remove one of the two"
        )


def _shared_key_value(settings: Any) -> Iterator[str]:
    value = settings.shared_key_value
    if isinstance(value, dict) and not (is_by_layer_type(value) and all(type(each) is bool for each in value.values())):
        yield f"shared_key_value={value} must be true or false, or map {' and '.join(LAYER_TYPES)} to true or false"


def _qk_norm(settings: Any) -> Iterator[str]:
    if settings.use_qk_layernorm and settings.qk_norm_type not in (None, "joint"):
        yield (
            f"qk_norm_type={settings.qk_norm_type} and use_qk_layernorm=True, which means joint, contradict each "
            "other; remove use_qk_layernorm"
        )
    over_all_heads = ("layernorm", "rmsnorm", "non_parametric_layernorm")
    if settings.qk_norm_type == "full_width" and settings.norm not in over_all_heads:
        yield (
            f"qk_norm_type=full_width: norm={settings.norm} has no form whose statistics span the heads of all ranks; "
            f"use norm {', '.join(over_all_heads)}, or qk_norm_type per_head"
        )


CHECKS = (
    _required,
    _head_widths,
    _mlp_width,
    _attention_kinds,
    _layer_types,
    _no_rope_layers,
    _rotary,
    _positions,
    _blocks,
    _fused_loss,
    _qk_norm,
    _shared_key_value,
)
