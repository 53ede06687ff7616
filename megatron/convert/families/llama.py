"""LlamaForCausalLM, and the table that most families share with it."""

from typing import Any, Dict, List, Mapping

from megatron.convert.families.base import (
    Family,
    activation_of,
    common_config,
    common_settings,
    hidden_act_of,
    refuse,
)
from megatron.convert.families.rope import rope_config, rope_settings, rotary_problems, whole_rotation_problems
from megatron.convert.operations import QKV, STACK, VOCABULARY
from megatron.convert.rules import EMBEDDING, HEAD, LAYER, NORM, Rule

ATTENTION = "model.layers.{i}.self_attn."
MLP = "model.layers.{i}.mlp."
QKV_NAMES = tuple(f"{ATTENTION}{x}_proj" for x in "qkv")


class LlamaLike(Family):
    """Families whose layer is Llama's, but for what their own settings say.

    bias_keys: which of attention_bias and mlp_bias the class knows.
    """

    fixed = dict(norm="rmsnorm", pos_emb="rotary", use_bias_in_attn_linear=False, use_bias_in_mlp=False)
    plain = frozenset("rms_norm_epsilon rotary_emb_base rope_scaling activation".split())
    bias_keys: Mapping[str, str] = {}

    def settings(self, config: Any) -> Dict[str, Any]:
        refuse([*whole_rotation_problems(config, self.architecture), *self.import_problems(config)])
        return {
            **common_settings(config),
            **rope_settings(config),
            **self.fixed,
            "rms_norm_epsilon": config.rms_norm_eps,
            "activation": activation_of(config.hidden_act),
            **{ours: getattr(config, theirs) for theirs, ours in self.bias_keys.items()},
        }

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        return {
            **common_config(self, neox_args, vocabulary),
            **rope_config(neox_args),
            "rms_norm_eps": neox_args.rms_norm_epsilon,
            "hidden_act": hidden_act_of(neox_args),
            **{theirs: getattr(neox_args, ours) for theirs, ours in self.bias_keys.items()},
        }

    def import_problems(self, config: Any) -> List[str]:
        """What a config of this class can say and no model here does."""
        return []

    def further_refusals(self, neox_args) -> List[str]:
        return super().further_refusals(neox_args) + rotary_problems(neox_args, self.architecture)

    def rules(self, neox_args) -> List[Rule]:
        return [*embedding_rules(neox_args), *pre_norm_rules(), *attention_rules(neox_args), *mlp_rules(neox_args)]


BIASES = {"attention_bias": "use_bias_in_attn_linear", "mlp_bias": "use_bias_in_mlp"}
"""attention_bias gives all four projections a bias, mlp_bias all three of the MLP."""


class Llama(LlamaLike):
    """Llama 1 to 3.x."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    expressed = LlamaLike.plain | set(BIASES.values())
    bias_keys = BIASES

    def further_refusals(self, neox_args) -> List[str]:
        problems = super().further_refusals(neox_args)
        geometry = neox_args.head_geometry()
        if geometry.hidden_size % geometry.num_attention_heads:
            problems.append(
                f"hidden_size={geometry.hidden_size} with num_attention_heads={geometry.num_attention_heads}: "
                "transformers' LlamaConfig refuses a hidden size that is no multiple of the heads, even with head_dim"
            )
        return problems


def embedding_rules(neox_args) -> List[Rule]:
    """Token table, final norm, and the output layer unless it is tied."""
    rules = [
        Rule(EMBEDDING, "word_embeddings.weight", "model.embed_tokens.weight", "v h", VOCABULARY),
        Rule(NORM, "norm.scale", "model.norm.weight", "h"),
    ]
    if neox_args.no_weight_tying:
        rules.append(Rule(HEAD, "final_linear.weight", "lm_head.weight", "v h", VOCABULARY))
    return rules


def pre_norm_rules() -> List[Rule]:
    """Norms before attention and MLP, under the same names in both."""
    return [
        Rule(LAYER, f"{name}.scale", f"model.layers.{{i}}.{name}.weight", "h")
        for name in ("input_layernorm", "post_attention_layernorm")
    ]


def attention_rules(neox_args) -> List[Rule]:
    """The projections fused into one, the output projection, and the biases that the model has."""
    rules = qkv_rules(neox_args)
    rules.append(Rule(LAYER, "attention.dense.weight", f"{ATTENTION}o_proj.weight", "h nd"))
    if neox_args.use_bias_in_attn_linear:
        rules.append(Rule(LAYER, "attention.dense.bias", f"{ATTENTION}o_proj.bias", "h"))
    return rules


def qkv_rules(neox_args) -> List[Rule]:
    """Queries, keys and values, or no values in layers where keys are values too."""
    layers_of: Dict[int, List[int]] = {}
    for number in range(neox_args.num_layers):
        layers_of.setdefault(len(neox_args.head_geometry(number).qkv_parts), []).append(number)
    rules = []
    for parts, layers in layers_of.items():
        names, rows = QKV_NAMES[:parts], ("nd", "md", "md")[:parts]
        kinds = [("weight", " h"), ("bias", "")] if neox_args.qkv_has_bias else [("weight", " h")]
        rules += [
            Rule(
                LAYER,
                f"attention.query_key_value.{kind}",
                tuple(f"{name}.{kind}" for name in names),
                tuple(f"{row}{columns}" for row in rows),
                QKV,
                tuple(layers),
            )
            for kind, columns in kinds
        ]
    return rules


def mlp_rules(neox_args) -> List[Rule]:
    """A gated MLP: linear1 is [up; gate]."""
    names = (f"{MLP}up_proj", f"{MLP}gate_proj")
    rules = [
        Rule(LAYER, "mlp.linear1.weight", tuple(f"{name}.weight" for name in names), ("f h", "f h"), STACK),
        Rule(LAYER, "mlp.linear2.weight", f"{MLP}down_proj.weight", "h f"),
    ]
    if neox_args.use_bias_in_mlp:
        rules += [
            Rule(LAYER, "mlp.linear1.bias", tuple(f"{name}.bias" for name in names), ("f", "f"), STACK),
            Rule(LAYER, "mlp.linear2.bias", f"{MLP}down_proj.bias", "h"),
        ]
    return rules
