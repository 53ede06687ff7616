"""GPTNeoXForCausalLM: Pythia, GPT-NeoX-20B, and what GPT-NeoX itself exports."""

from typing import Any, Dict, List, NamedTuple

from megatron.convert.families.base import Family, common_config, common_settings, refuse
from megatron.convert.families.rope import proportional_problems, rope_config, rope_settings, rotary_problems
from megatron.convert.operations import VOCABULARY
from megatron.convert.rules import EMBEDDING, HEAD, LAYER, NORM, Rule
from megatron.errors import ConversionError
from megatron.geometry import HeadGeometry

ROTARY = "rotary_emb_base rotary_pct rope_scaling".split()


class Plain(NamedTuple):
    """An activation without a gate: `activation` and `bias_gelu_fusion`, which is the tanh form of gelu."""

    activation: str
    bias_gelu_fusion: bool = False


PLAIN = {
    "gelu": Plain("gelu"),
    "gelu_python": Plain("gelu"),
    "gelu_fast": Plain("gelu", True),
    "gelu_new": Plain("gelu", True),
    "gelu_pytorch_tanh": Plain("gelu", True),
    "relu": Plain("relu"),
    "silu": Plain("silu"),
    "swish": Plain("silu"),
    "mish": Plain("mish"),
}
"""hidden_act of an MLP without a gate, and ours. Their three names of the tanh form are one function."""


def plain_activation_settings(hidden_act: str) -> Dict[str, Any]:
    """The settings of an activation without a gate. Raises ConversionError for one that we do not have."""
    if hidden_act not in PLAIN:
        raise ConversionError(f"hidden_act={hidden_act}: no activation here is that; known: {', '.join(PLAIN)}")
    return PLAIN[hidden_act]._asdict()


def plain_hidden_act(neox_args, tanh_gelu: str) -> Any:
    """Inverse; tanh_gelu is the family's name of that. None if there is none."""
    activation = "silu" if neox_args.activation == "swish" else neox_args.activation
    if activation == "gelu" and neox_args.bias_gelu_fusion:
        return tanh_gelu
    return next((theirs for theirs, ours in PLAIN.items() if ours == Plain(activation)), None)


def plain_activation_refusals(neox_args, architecture: str) -> List[str]:
    """Gated activations, and those without a name in transformers."""
    if plain_hidden_act(neox_args, "gelu_fast") is not None:
        return []
    return [
        f"activation={neox_args.activation}: a {architecture} has an MLP without a gate, with one of "
        f"{', '.join(dict.fromkeys(ours.activation for ours in PLAIN.values()))}"
    ]


def partial_rope_config(neox_args) -> Dict[str, Any]:
    """rope_parameters with the share of a head that is rotated."""
    config = rope_config(neox_args)
    # Also a share of 1, which is not the classes' default.
    return {**config, "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": neox_args.rotary_pct}}


class GPTNeoX(Family):
    """A head is hidden_size / heads wide, as transformers computes it whatever head_dim says; as many key heads as
    query heads, whose QKV rows lie as in our checkpoints."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    fixed = dict(pos_emb="rotary")
    expressed = frozenset(
        [*ROTARY, *"layernorm_epsilon activation bias_gelu_fusion gpt_j_residual use_bias_in_attn_linear".split()]
    )

    def settings(self, config: Any) -> Dict[str, Any]:
        refuse(self._import_problems(config))
        return {
            **common_settings(config),
            **rope_settings(config),
            **self.fixed,
            **plain_activation_settings(config.hidden_act),
            "layernorm_epsilon": config.layer_norm_eps,
            "gpt_j_residual": config.use_parallel_residual,
            "use_bias_in_attn_linear": config.attention_bias,
            "use_bias_in_mlp": True,
            "hidden_dropout": config.hidden_dropout,
        }

    def _import_problems(self, config: Any) -> List[str]:
        problems = []
        quotient = HeadGeometry.from_config(config.hidden_size, config.num_attention_heads).head_dim
        for key, wanted in (
            ("head_dim", quotient),
            ("num_key_value_heads", config.num_attention_heads),
            ("rope_theta", config.rope_parameters["rope_theta"]),
        ):
            if getattr(config, key, None) not in (None, wanted):
                problems.append(
                    f"{key}={getattr(config, key)}: transformers' {self.architecture} ignores it and has {wanted}; "
                    "remove it from config.json if that is right"
                )
        return problems

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        theirs = {
            **common_config(self, neox_args, vocabulary),
            **partial_rope_config(neox_args),
            "layer_norm_eps": neox_args.layernorm_epsilon,
            "hidden_act": plain_hidden_act(neox_args, "gelu_fast"),
            "use_parallel_residual": neox_args.gpt_j_residual,
            "attention_bias": neox_args.use_bias_in_attn_linear,
            "hidden_dropout": neox_args.hidden_dropout,
        }
        del theirs["num_key_value_heads"]
        return theirs

    def further_refusals(self, neox_args) -> List[str]:
        problems = plain_activation_refusals(neox_args, self.architecture)
        problems += rotary_problems(neox_args, self.architecture)
        problems += proportional_problems(neox_args, self.architecture)
        geometry = neox_args.head_geometry()
        if not geometry.matches_hidden:
            problems.append(
                f"head_dim={geometry.head_dim} with hidden_size={geometry.hidden_size} and "
                f"num_attention_heads={geometry.num_attention_heads}: a {self.architecture} ignores head_dim, its "
                "heads are hidden_size / num_attention_heads wide"
            )
        if geometry.is_gqa:
            problems.append(
                f"num_kv_heads={geometry.num_kv_heads}: a {self.architecture} has as many as "
                f"num_attention_heads={geometry.num_attention_heads}"
            )
        return problems

    def rules(self, neox_args) -> List[Rule]:
        attention = ["query_key_value.weight", "dense.weight"]
        if neox_args.use_bias_in_attn_linear:
            attention += ["query_key_value.bias", "dense.bias"]
        return [*self._outer_rules(neox_args), *_layer_rules(attention)]

    def _outer_rules(self, neox_args) -> List[Rule]:
        rules = [
            Rule(EMBEDDING, "word_embeddings.weight", "gpt_neox.embed_in.weight", "v h", VOCABULARY),
            Rule(NORM, "norm.weight", "gpt_neox.final_layer_norm.weight", "h"),
            Rule(NORM, "norm.bias", "gpt_neox.final_layer_norm.bias", "h"),
        ]
        if neox_args.no_weight_tying:
            rules.append(Rule(HEAD, "final_linear.weight", "embed_out.weight", "v h", VOCABULARY))
        return rules


_SHAPES = {
    "query_key_value.weight": "qkv h",
    "query_key_value.bias": "qkv",
    "dense.weight": "h nd",
    "dense.bias": "h",
}
_MLP = (
    ("linear1.weight", "dense_h_to_4h.weight", "f h"),
    ("linear1.bias", "dense_h_to_4h.bias", "f"),
    ("linear2.weight", "dense_4h_to_h.weight", "h f"),
    ("linear2.bias", "dense_4h_to_h.bias", "h"),
)


def _layer_rules(attention: List[str]) -> List[Rule]:
    layer = "gpt_neox.layers.{i}."
    rules = [
        Rule(LAYER, name, f"{layer}{name}", "h")
        for norm in ("input_layernorm", "post_attention_layernorm")
        for name in (f"{norm}.weight", f"{norm}.bias")
    ]
    rules += [Rule(LAYER, f"attention.{name}", f"{layer}attention.{name}", _SHAPES[name]) for name in attention]
    return rules + [Rule(LAYER, f"mlp.{ours}", f"{layer}mlp.{theirs}", shape) for ours, theirs, shape in _MLP]
