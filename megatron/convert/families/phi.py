"""PhiForCausalLM (Phi 1, 1.5 and 2): attention and MLP beside each other behind one norm, biases everywhere."""

from typing import Any, Dict, List, Sequence

import torch

from megatron.convert.families.base import Family, common_config, common_settings
from megatron.convert.families.gpt_neox import (
    ROTARY,
    partial_rope_config,
    plain_activation_refusals,
    plain_activation_settings,
    plain_hidden_act,
)
from megatron.convert.families.llama import ATTENTION, MLP, QKV_NAMES
from megatron.convert.families.rope import proportional_problems, rope_settings, rotary_problems
from megatron.convert.operations import QKV, VOCABULARY, Operation, PadVocabulary
from megatron.convert.rules import EMBEDDING, HEAD, LAYER, NORM, Rule
from megatron.convert.widths import LayerWidths
from megatron.errors import ConversionError


class WithoutBias(PadVocabulary):
    """(table [v, h], bias [v] of the output layer) <-> our table, where ours has no such bias: it must be zero."""

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        """Raises ConversionError for a bias that is not zero."""
        table, bias = tensors
        if not bias.is_meta and bias.any():
            raise ConversionError(
                f"lm_head.bias is not zero (up to {bias.abs().max().item():.3g}): an output layer that is tied to the "
                "embedding has no bias here; set tie_word_embeddings to false and give lm_head its own weight"
            )
        return super().merge([table], widths)

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        (table,) = super().split(whole, widths)
        return [table, table.new_zeros(widths.vocabulary)]

    def rows_added(self, widths: LayerWidths) -> int:
        """None in place: the last tensor is the bias, not the table."""
        return 0


class Unused(Operation):
    """A parameter that has no counterpart and no effect: made anew with one value, and left out on the way back."""

    def __init__(self, value: float):
        self.value = value

    def merge(self, tensors: Sequence[torch.Tensor], widths: LayerWidths) -> torch.Tensor:
        return torch.full((widths.geometry.hidden_size,), self.value)

    def split(self, whole: torch.Tensor, widths: LayerWidths) -> List[torch.Tensor]:
        return []


WITHOUT_BIAS = WithoutBias()


class Phi(Family):
    """The norm before the MLP that GPT-NeoX's checkpoints have with gpt_j_tied is unused, and Phi has none."""

    model_type = "phi"
    architecture = "PhiForCausalLM"
    fixed = dict(pos_emb="rotary", gpt_j_residual=True, gpt_j_tied=True)
    expressed = frozenset(
        [*ROTARY, *"layernorm_epsilon activation bias_gelu_fusion qk_norm_type use_bias_in_output_layer".split()]
    )

    def settings(self, config: Any) -> Dict[str, Any]:
        return {
            **common_settings(config),
            **rope_settings(config),
            **self.fixed,
            **plain_activation_settings(config.hidden_act),
            "layernorm_epsilon": config.layer_norm_eps,
            "use_bias_in_attn_linear": True,
            "use_bias_in_mlp": True,
            "use_bias_in_output_layer": not config.tie_word_embeddings,
            "hidden_dropout": config.resid_pdrop,
            "qk_norm_type": "per_head" if config.qk_layernorm else None,
        }

    def config(self, neox_args, vocabulary: int) -> Dict[str, Any]:
        return {
            **common_config(self, neox_args, vocabulary),
            **partial_rope_config(neox_args),
            "layer_norm_eps": neox_args.layernorm_epsilon,
            "hidden_act": plain_hidden_act(neox_args, "gelu_new"),
            "qk_layernorm": neox_args.qk_norm_type is not None,
            "resid_pdrop": neox_args.hidden_dropout,
        }

    def further_refusals(self, neox_args) -> List[str]:
        problems = plain_activation_refusals(neox_args, self.architecture)
        problems += rotary_problems(neox_args, self.architecture)
        problems += proportional_problems(neox_args, self.architecture)
        geometry = neox_args.head_geometry()
        if neox_args.qk_norm_type not in (None, "per_head"):
            problems.append(f"qk_norm_type={neox_args.qk_norm_type}: a {self.architecture} has per_head or none")
        elif neox_args.qk_norm_type and not geometry.matches_hidden:
            problems.append(
                f"head_dim={geometry.head_dim} with qk_norm_type=per_head: the norms of transformers' "
                f"{self.architecture} are hidden_size / num_attention_heads wide, whatever head_dim is"
            )
        return problems

    def rules(self, neox_args) -> List[Rule]:
        return [*_outer_rules(neox_args), *_norm_rules(neox_args), *_attention_rules(), *_mlp_rules()]


def _outer_rules(neox_args) -> List[Rule]:
    table, head, bias = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
    rules = [Rule(NORM, f"norm.{kind}", f"model.final_layernorm.{kind}", "h") for kind in ("weight", "bias")]
    if not neox_args.no_weight_tying:
        return [Rule(EMBEDDING, "word_embeddings.weight", (table, bias), ("v h", "v"), WITHOUT_BIAS), *rules]
    rules.append(Rule(EMBEDDING, "word_embeddings.weight", table, "v h", VOCABULARY))
    if not neox_args.use_bias_in_output_layer:
        return [*rules, Rule(HEAD, "final_linear.weight", (head, bias), ("v h", "v"), WITHOUT_BIAS)]
    rules.append(Rule(HEAD, "final_linear.weight", head, "v h", VOCABULARY))
    return [*rules, Rule(HEAD, "final_linear.bias", bias, "v", VOCABULARY)]


def _norm_rules(neox_args) -> List[Rule]:
    rules = []
    for kind, value in (("weight", 1.0), ("bias", 0.0)):
        rules += [
            Rule(LAYER, f"input_layernorm.{kind}", f"model.layers.{{i}}.input_layernorm.{kind}", "h"),
            Rule(LAYER, f"post_attention_layernorm.{kind}", (), (), Unused(value)),
        ]
        if neox_args.qk_norm_type:
            names = [f"{x}_layernorm.{kind}" for x in "qk"]
            rules += [Rule(LAYER, f"attention.{name}", f"{ATTENTION}{name}", "d") for name in names]
    return rules


def _attention_rules() -> List[Rule]:
    weights, biases = (tuple(f"{name}.{kind}" for name in QKV_NAMES) for kind in ("weight", "bias"))
    return [
        Rule(LAYER, "attention.query_key_value.weight", weights, ("nd h", "md h", "md h"), QKV),
        Rule(LAYER, "attention.query_key_value.bias", biases, ("nd", "md", "md"), QKV),
        Rule(LAYER, "attention.dense.weight", f"{ATTENTION}dense.weight", "h nd"),
        Rule(LAYER, "attention.dense.bias", f"{ATTENTION}dense.bias", "h"),
    ]


def _mlp_rules() -> List[Rule]:
    return [
        Rule(LAYER, f"mlp.linear{number}.{kind}", f"{MLP}fc{number}.{kind}", shape)
        for number, kind, shape in ((1, "weight", "f h"), (1, "bias", "f"), (2, "weight", "h f"), (2, "bias", "h"))
    ]
