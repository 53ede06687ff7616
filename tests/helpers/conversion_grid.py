"""Every family of Hugging Face's in every geometry, through files: in from theirs, and out to theirs. The cells of the
table in docs/conversion.md.
"""

import logging
from pathlib import Path
from typing import Any, Dict, Union

import torch
import transformers
import yaml
from torch import nn

from megatron.checkpointing.model_settings import FUNCTION_SETTINGS, inference_args
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.weights import load_weights_from
from megatron.convert.exporting import export_hf
from megatron.convert.families import FAMILIES
from megatron.convert.importing import import_hf
from megatron.errors import ConversionError
from megatron.geometry import HeadGeometry
from megatron.model.gpt2_model import GPT2ModelSequential
from megatron.neox_arguments import NeoXArgs
from tests.helpers.configs import tiny_args
from tests.helpers.convert_models import PADDED, VOCAB, hf_config, hf_model, text, their_logits
from tests.helpers.geometries import ALL
from tests.helpers.tolerances import FORWARD

ALLOWED = FORWARD[torch.float32]
"""Largest difference of logits, which are of the order of 6."""
BASE, LOCAL_BASE = 5000.0, 300.0

Cell = Union[float, str]
"""The largest difference of logits, or the refusal."""

MIXED = ["sliding_attention", "full_attention"]
TYPICAL: Dict[str, Dict[str, Any]] = {
    "llama": dict(
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=BASE,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8,
        )
    ),
    "mistral": dict(sliding_window=7),
    "ministral": dict(sliding_window=7, layer_types=MIXED),
    "qwen2": dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=7, layer_types=MIXED),
    "qwen3": dict(attention_bias=True),
    "smollm3": dict(no_rope_layers=[1, 0]),
    "granite": dict(attention_multiplier=0.31, embedding_multiplier=3.0),
    "mixtral": dict(num_local_experts=2),
    "gemma2": dict(query_pre_attn_scalar=5, attn_logit_softcapping=1.5, final_logit_softcapping=9.0, sliding_window=7),
    "gemma3_text": dict(
        query_pre_attn_scalar=13,
        sliding_window=7,
        layer_types=MIXED,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=BASE),
            sliding_attention=dict(rope_type="default", rope_theta=LOCAL_BASE),
        ),
    ),
    "gemma4_text": dict(
        global_head_dim=40,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=9.0,
        sliding_window=7,
        layer_types=MIXED,
        rope_parameters=dict(
            full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=BASE),
            sliding_attention=dict(rope_type="default", rope_theta=LOCAL_BASE),
        ),
    ),
}
"""What is said beside the geometry: what many of the family's models have."""
PARTIAL = ("phi", "gpt_neox")
"""Families whose heads are rotated in part; here 8 dimensions of them."""


def hf_config_of(model_type: str, geometry: str) -> transformers.PreTrainedConfig:
    """Their config object of a geometry of tests/helpers/geometries.py. Raises ConversionError if they refuse it.

    Where the geometry has no head_dim, there is none, which is for the class to interpret.
    """
    widths = dict(ALL[geometry])
    heads = widths["num_attention_heads"]
    widths["num_key_value_heads"] = widths.pop("num_kv_heads", heads)
    settings = {**TYPICAL.get(model_type, {}), **widths}
    if model_type in PARTIAL:
        share = _rotary_share(geometry)
        settings["rope_parameters"] = dict(rope_type="default", rope_theta=BASE, partial_rotary_factor=share)
    try:
        config = hf_config(model_type, **settings)
    except Exception as error:  # the classes of their validation
        raise ConversionError(f"transformers: {str(error).strip().splitlines()[-1].strip()}") from None
    if model_type == "gpt_neox":
        del config.num_key_value_heads  # the class has none
    return config


def _rotary_share(geometry: str) -> float:
    return 8 / HeadGeometry.from_config(**ALL[geometry]).head_dim


def measure_in(model_type: str, geometry: str, folder: Path) -> Cell:
    """A model of theirs is saved, imported and run here: how far its logits are from theirs."""
    try:
        hf = _hf_model(model_type, geometry)
        hf.save_pretrained(folder / "theirs")
        imported = import_hf(str(folder / "theirs"), str(folder / "ours"), progress=False)
    except ConversionError as error:
        return _reasons(error)
    return largest(our_logits(imported), their_logits(hf, text()))


def _hf_model(model_type: str, geometry: str) -> nn.Module:
    config = hf_config_of(model_type, geometry)
    try:
        return hf_model(config, zero_centered=model_type in ("gemma", "gemma2", "gemma3_text"))
    except TypeError as error:  # a class whose config leaves out what its model needs
        raise ConversionError(f"transformers cannot make a {model_type} without head_dim: {error}") from None


def measure_out(model_type: str, geometry: str, folder: Path) -> Cell:
    """A model of ours is saved, exported and run by transformers."""
    checkpoint = save_ours(our_args(model_type, geometry), folder / "ours")
    try:
        exported = export_hf(
            str(checkpoint), str(folder / "theirs"), architecture=model_type, vocab_size=VOCAB, progress=False
        )
    except ConversionError as error:
        return _reasons(error)
    hf = transformers.AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    return largest(our_logits(str(checkpoint / "global_step0")), their_logits(hf.eval(), text()))


def _reasons(error: ConversionError) -> str:
    """One a line, without the heading that names the folder, or the families that can hold the model."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "\n".join(line for line in lines if not line.endswith(":"))


def our_args(model_type: str, geometry: str) -> NeoXArgs:
    """Ours in a geometry, all else as an import of the family says. There head_dim may be absent, too."""
    theirs = hf_config_of(model_type if model_type != "mixtral" else "mistral", "quotient")
    settings = FAMILIES[theirs.model_type].settings(theirs)
    widths = {"num_kv_heads": None, "head_dim": None, **ALL[geometry]}
    if model_type.startswith("gemma"):
        settings["embedding_multiplier"] = widths["hidden_size"] ** 0.5
    if model_type in PARTIAL:
        settings["rotary_pct"] = _rotary_share(geometry)
    return tiny_args(**{**settings, **widths, "ffn_hidden_size": 46, "padded_vocab_size": PADDED})


def save_ours(args: NeoXArgs, folder: Path) -> Path:
    """A checkpoint of random weights as training writes it: logits of order 6, no norm the identity, no bias 0."""
    generator, weights = torch.Generator().manual_seed(5), {}
    for name, tensor in GPT2ModelSequential(args).state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[name] = tensor + noise * 0.4 if tensor.dim() == 1 else noise * 1.5 * tensor.shape[-1] ** -0.5
    step = folder / "global_step0"
    (step / "configs").mkdir(parents=True)
    settings = {name: value for name, value in args.given().items() if name in FUNCTION_SETTINGS}
    (step / "configs" / "model.yml").write_text(yaml.safe_dump(settings))
    torch.save({"module": weights, "iteration": 0, "args": {}}, step / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step0")
    return folder


@torch.no_grad()
def our_logits(checkpoint: str) -> torch.Tensor:
    """[rows, tokens, VOCAB] of the common text, by our model of a checkpoint folder."""
    tokens = text()
    args = inference_args(CheckpointReader(checkpoint), length=tokens.shape[1])
    model = GPT2ModelSequential(args).eval()
    load_weights_from(args, model, checkpoint)
    return model((tokens, torch.arange(tokens.shape[1]).expand_as(tokens)))[..., :VOCAB]


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference. Raises AssertionError for logits so small that there would be none."""
    assert theirs.abs().max() > 1, "the comparison would see nothing"
    return (ours.double() - theirs.double()).abs().max().item()


def quiet() -> None:
    """Without progress bars and notes, of which each cell would bring some."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
