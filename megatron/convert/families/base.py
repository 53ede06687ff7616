"""What a family of Hugging Face models is: a config mapping and a weight table, each read in both directions."""

from typing import Any, Dict, FrozenSet, List, Mapping

from megatron.checkpointing.model_settings import FUNCTION_SETTINGS
from megatron.convert.families.rope import rope_config, rope_settings
from megatron.convert.rules import Rule
from megatron.errors import ConfigError, ConversionError
from megatron.geometry import HeadGeometry
from megatron.neox_arguments.fields import defaults
from megatron.neox_arguments.widths import PER_LAYER, described, is_per_layer, mixed_layers

__all__ = [
    "COMMON",
    "GATED",
    "Family",
    "activation_of",
    "common_config",
    "common_settings",
    "head_dim_of",
    "hidden_act_of",
    "refuse",
    "rope_config",
    "rope_settings",
    "scale_setting",
]

GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "relu": "reglu"}
"""hidden_act of a gated MLP -> our activation. The first name of each is the one that is written."""

COMMON = frozenset(
    """
    num_layers hidden_size num_attention_heads num_kv_heads head_dim ffn_hidden_size intermediate_size
    expansion_factor mlp_multiple_of seq_length max_position_embeddings attention_config make_vocab_size_divisible_by
    tokenizer_type no_weight_tying output_layer_parallelism apply_query_key_layer_scaling attention_softmax_in_fp32
    rotary_save_freqs_buffer te_mha te_layernorm_mlp
    """.split()
)
"""Settings that every family carries in its own way, or that do not change the function."""


def refuse(problems: List[str]) -> None:
    """Raises ConversionError with all of them, if there are any."""
    if problems:
        raise ConversionError(problems)


def common_settings(config: Any) -> Dict[str, Any]:
    """The settings that all families have: sizes, tying, head_dim as a number, seq_length the model's context.

    head_dim is the class's: transformers' config object knows its default. Null there means the quotient.
    Attention has no bias unless a family says so.
    """
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": head_dim_of(config),
        "ffn_hidden_size": config.intermediate_size,
        "seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "no_weight_tying": not config.tie_word_embeddings,
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
        "attention_dropout": config.attention_dropout or 0.0,
    }


def head_dim_of(config: Any) -> int:
    """The class's head_dim. Raises ConversionError if the class leaves it to a quotient that is not whole."""
    width = getattr(config, "head_dim", None)
    if width is not None:
        return width
    try:
        return HeadGeometry.from_config(config.hidden_size, config.num_attention_heads).head_dim
    except ConfigError as error:
        raise ConversionError("\n".join(error.problems)) from None


def common_config(family: "Family", neox_args, vocabulary: int) -> Dict[str, Any]:
    """Inverse of common_settings, with the names of the class.

    The special tokens are null, which says unknown: left out, they would be the class's, perhaps beyond the vocabulary.
    """
    geometry, mlp = neox_args.head_geometry(0), neox_args.mlp_geometry()
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocabulary,
        "num_hidden_layers": neox_args.num_layers,
        "hidden_size": geometry.hidden_size,
        "num_attention_heads": geometry.num_attention_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "intermediate_size": mlp.ffn_hidden_size,
        "max_position_embeddings": neox_args.max_position_embeddings,
        "tie_word_embeddings": not neox_args.no_weight_tying,
        "attention_dropout": neox_args.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def scale_setting(config: Any, scale: float) -> Dict[str, Any]:
    """softmax_scale, null where it is what head_dim gives anyway."""
    default = HeadGeometry.from_config(config.hidden_size, config.num_attention_heads, head_dim=head_dim_of(config))
    return {"softmax_scale": None if scale == default.default_softmax_scale else scale}


def activation_of(hidden_act: str) -> str:
    """Our activation for a gated MLP. Raises ConversionError for one that we do not have."""
    if hidden_act not in GATED:
        raise ConversionError(f"hidden_act={hidden_act}: no gated activation here is that; known: {', '.join(GATED)}")
    return GATED[hidden_act]


def hidden_act_of(neox_args) -> str:
    """Inverse of activation_of."""
    return next(theirs for theirs, ours in GATED.items() if ours == neox_args.activation)


class Family:
    """One Hugging Face model type.

    model_type, architecture: as in config.json. fixed: our settings that every model of the family has.
    expressed: further settings of ours that its config can say. All others must be at GPT-NeoX's defaults.
    by_layer: whether its config can say head_dim and num_kv_heads by layer.
    """

    model_type: str
    architecture: str
    fixed: Mapping[str, Any] = {}
    expressed: FrozenSet[str] = frozenset()
    by_layer: bool = False

    def settings(self, config: Any) -> Dict[str, Any]:
        """A transformers config object of this type -> our settings, `fixed` included.

        Raises ConversionError for what cannot be held, with every problem.
        """
        raise NotImplementedError

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        """Our arguments -> the architecture's keys of config.json, head_dim always among them as a number.

        Only called when `refusals` is empty.
        """
        raise NotImplementedError

    def rules(self, neox_args) -> List[Rule]:
        """The weight table of a model with these arguments."""
        raise NotImplementedError

    def refusals(self, neox_args) -> List[str]:
        """Why this family cannot hold the model, as setting=value and the reason; empty if it can."""
        widths = width_refusals(self, neox_args)
        # The rest asks for the one geometry of the model.
        return [*widths, *self._unexpressed(neox_args), *([] if widths else self.further_refusals(neox_args))]

    def further_refusals(self, neox_args) -> List[str]:
        """What the comparison of settings cannot see: values that are expressed, but not all of them."""
        if "activation" in self.expressed and neox_args.activation not in GATED.values():
            return [f"activation={neox_args.activation}: a {self.architecture} has a gated MLP"]
        return []

    def _unexpressed(self, neox_args) -> List[str]:
        """Each setting of the function that is neither `fixed`, nor expressed, nor at its default."""
        standard = {**defaults(), "layer_types": ["full_attention"] * neox_args.num_layers}
        problems = []
        for name in sorted(FUNCTION_SETTINGS - COMMON - self.expressed):
            value, wanted = getattr(neox_args, name), self.fixed.get(name, standard[name])
            if value != wanted and not _is_unused(name, neox_args) and not _is_neutral(name, neox_args):
                problems.append(f"{name}={value}: a {self.architecture} has {name}={wanted}")
        return problems


def width_refusals(family: Family, neox_args) -> List[str]:
    """Why a class with one head_dim cannot hold layers that differ: which do, and where they can go. No class can hold
    heads of several widths in a layer."""
    if neox_args.has_uniform_heads or (family.by_layer and not mixed_layers(neox_args)):
        return []
    found = neox_args.layers_by_geometry()
    given = {name: getattr(neox_args, name) for name in PER_LAYER}
    settings = ", ".join(f"{name}={value}" for name, value in given.items() if is_per_layer(value))
    reason = f"a {family.architecture} has the same heads in all layers{families_by_layer()}"
    if mixed_layers(neox_args):
        reason = f"a {family.architecture} has heads of one width in a layer, as all classes of transformers have"
    return [f"{settings}: {described(found)}; {reason}"]


def families_by_layer() -> str:
    """A hint at the families whose layers may differ, to follow a reason; empty if there are none."""
    from megatron.convert.families import FAMILIES

    names = [name for name, family in FAMILIES.items() if family.by_layer]
    return f"; {' and '.join(names)} can have heads of several widths" if names else ""


_ONLY_WITH = {
    "rotary_pct": ("pos_emb", "rotary"),
    "rotary_emb_base": ("pos_emb", "rotary"),
    "rpe_num_buckets": ("pos_emb", "rpe"),
    "rpe_max_distance": ("pos_emb", "rpe"),
    "layernorm_epsilon": ("norm", "layernorm"),
    "rms_norm_epsilon": ("norm", "rmsnorm"),
    "scalenorm_epsilon": ("norm", "scalenorm"),
    "bias_gelu_fusion": ("activation", "gelu"),
}
"""Settings that have no effect unless another one has this value."""


def _is_unused(name: str, neox_args) -> bool:
    switch, value = _ONLY_WITH.get(name, (None, None))
    return switch is not None and getattr(neox_args, switch) != value


_NEUTRAL = {
    "softmax_scale": lambda args: all(
        args.softmax_scale == group.default_softmax_scale
        for geometry in args.layers_by_geometry()
        for group in geometry.groups
    ),
    "embedding_multiplier": lambda args: args.embedding_multiplier == 1,
    "no_rope_layers": lambda args: all(args.no_rope_layers),
    "use_qk_layernorm": lambda args: args.qk_norm_type == "joint",  # said by qk_norm_type already
}
"""Settings whose values can say what their default says: (arguments) -> whether this one does."""


def _is_neutral(name: str, neox_args) -> bool:
    return name in _NEUTRAL and _NEUTRAL[name](neox_args)
