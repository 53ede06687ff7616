"""Conversion, tried: a tiny random model of transformers', the same model as ours, and both ways back.

In memory, by the weight tables alone: `as_ours`, `as_theirs`, `check_family`. Through folders: `save_hf`.
"""

from typing import Any, Dict, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron.convert.families import FAMILIES, Family
from megatron.convert.rules import write_out
from megatron.model.gpt2_model import GPT2ModelSequential
from megatron.neox_arguments import NeoXArgs
from tests.helpers.configs import tiny_args
from tests.helpers.tolerances import FORWARD, assert_close

VOCAB, PADDED, TOKENS = 118, 128, 23
"""Tokens that they have, rows that we have, length of the text."""

BOOKKEEPING = frozenset(
    """
    transformers_version dtype torch_dtype _name_or_path initializer_range use_cache bos_token_id eos_token_id
    pad_token_id pretraining_tp return_dict output_hidden_states output_attentions id2label label2id problem_type
    chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size
    max_window_layers use_sliding_window no_rope_layer_interval _attn_implementation attn_implementation
    """.split()
)
"""Keys of config.json that do not change what the weights compute. The window and rotary ones among them only fill in
lists (layer_types, no_rope_layers) that are compared."""

Tensors = Dict[str, torch.Tensor]


def text(seed: int = 7, rows: int = 2) -> torch.Tensor:
    """Tokens [rows, TOKENS]."""
    return torch.randint(0, VOCAB, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def hf_config(model_type: str, **changes: Any) -> transformers.PreTrainedConfig:
    """A config object of a tiny model; `changes` win over hidden 64, 4 heads of which 2 for keys, 2 layers."""
    tiny = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=46,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return CONFIG_MAPPING[model_type](**{**tiny, **changes})


def hf_model(config: transformers.PreTrainedConfig, zero_centered: bool = False) -> nn.Module:
    """The causal model of a config with weights under which logits are of order 6, no norm is the identity, and no
    bias is 0. zero_centered: its norms multiply by 1 + weight."""
    config._attn_implementation = "eager"
    hf = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    config.architectures = [type(hf).__name__]  # as saving it does
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(noise * 0.4 + (0.0 if zero_centered else 1.0))
            elif parameter.dim() == 1:
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
        for buffer in _kept_buffers(hf).values():
            buffer.copy_(0.7 + 0.6 * torch.rand(buffer.shape, generator=generator))
    return hf


def hf_tensors(hf: nn.Module) -> Tensors:
    """What a checkpoint of it holds: a tied output layer is not in it."""
    return {name: parameter.detach() for name, parameter in hf.named_parameters()} | _kept_buffers(hf)


def _kept_buffers(hf: nn.Module) -> Tensors:
    """Numbers that are not trained and are in files, e.g. Gemma 4's layer_scalar."""
    kept = hf.state_dict()
    return {name: buffer for name, buffer in hf.named_buffers() if name in kept}


def our_args(family: Family, config: transformers.PreTrainedConfig, **changes: Any) -> NeoXArgs:
    """Our arguments of their model, at one rank."""
    return tiny_args(**{"padded_vocab_size": PADDED, **family.settings(config), **changes})


def as_ours(family: Family, args: NeoXArgs, theirs: Tensors) -> Tensors:
    """Their tensors by the names of GPT2ModelSequential. Each must be used exactly once and have the table's shape."""
    ours, left = {}, dict(theirs)
    for line in write_out(family.rules(args), args, VOCAB):
        parts = [left.pop(name) for name in line.theirs]
        assert [tuple(part.shape) for part in parts] == list(line.shapes), line
        ours[f"sequential.{line.index}.{line.ours}"] = line.operation.merge(parts, line.widths)
    assert not left, f"not used: {sorted(left)}"
    return ours


def as_theirs(family: Family, args: NeoXArgs, ours: Tensors) -> Tensors:
    """Inverse of as_ours, of which each tensor must be used too."""
    theirs, left = {}, dict(ours)
    for line in write_out(family.rules(args), args, VOCAB):
        whole = left.pop(f"sequential.{line.index}.{line.ours}")
        parts = line.operation.split(whole, line.widths)
        assert [tuple(part.shape) for part in parts] == list(line.shapes), line
        theirs.update(zip(line.theirs, parts, strict=True))
    assert not left, f"not used: {sorted(left)}"
    return theirs


def our_logits(args: NeoXArgs, weights: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, VOCAB], of the padded vocabulary only the true rows."""
    model = GPT2ModelSequential(args).eval()
    model.load_state_dict(weights, strict=True)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return model((tokens, positions))[..., :VOCAB]


def their_logits(hf: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, VOCAB]"""
    with torch.no_grad():
        return hf(input_ids=tokens, use_cache=False).logits


def function_keys(config: transformers.PreTrainedConfig) -> Dict[str, Any]:
    """The architecture keys of a config object, idle ones left out and each in its one spelling."""
    keys = {key: value for key, value in config.to_dict().items() if key not in BOOKKEEPING}
    if "sliding_attention" not in keys.get("layer_types", ["sliding_attention"]):
        keys.pop("sliding_window", None)
    if isinstance(keys.get("rope_parameters"), dict):
        keys["rope_parameters"] = {key: x for key, x in keys["rope_parameters"].items() if key != "type"}
    return keys


def written_config(family: Family, args: NeoXArgs) -> transformers.PreTrainedConfig:
    """The config object of what an export of our model writes."""
    assert family.refusals(args) == []
    keys = family.config(args, VOCAB)
    assert type(keys["head_dim"]) is int, "always a number"
    return CONFIG_MAPPING[family.model_type].from_dict(keys)


class Converted(NamedTuple):
    """What check_family found."""

    args: NeoXArgs
    weights: Tensors
    difference: float


def check_family(config: transformers.PreTrainedConfig, zero_centered: bool = False, **changes: Any) -> Converted:
    """Their model, imported: equal logits; exported again: equal tensors and config; imported again: the same.

    changes: settings of ours that win over the import's.
    """
    family, tokens = FAMILIES[config.model_type], text()
    hf = hf_model(config, zero_centered)
    theirs = hf_tensors(hf)
    args = our_args(family, config, **changes)
    ours = as_ours(family, args, theirs)
    expected, logits = their_logits(hf, tokens), our_logits(args, ours, tokens)
    assert expected.abs().max() > 1, "the comparison would see nothing"
    assert_close(logits, expected, FORWARD, "logits")

    back = as_theirs(family, args, ours)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    written = written_config(family, args)
    assert function_keys(written) == {**function_keys(config), **_head_dim_of(config, args)}

    again = our_args(family, written, **changes)
    assert differing_settings(again, args) == {}
    second = as_ours(family, again, back)
    assert second.keys() == ours.keys() and all(torch.equal(second[name], ours[name]) for name in ours)
    return Converted(args, ours, (logits - expected).abs().max().item())


def _head_dim_of(config: transformers.PreTrainedConfig, args: NeoXArgs) -> Dict[str, Any]:
    """The one key that an export may add: the width that the class left to a quotient."""
    if config.to_dict().get("head_dim") is not None:
        return {}
    return {"head_dim": config.hidden_size // config.num_attention_heads}


def differing_settings(one: NeoXArgs, other: NeoXArgs) -> Dict[str, Any]:
    """{name: (of one, of the other)}"""
    mine, theirs = one.to_dict(), other.to_dict()
    return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def save_hf(hf: nn.Module, folder) -> str:
    """As transformers saves it: config.json, generation_config.json and safetensors. Returns the folder's name."""
    hf.save_pretrained(folder)
    return str(folder)
