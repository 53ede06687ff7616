"""Exported adapters: PEFT, and transformers' model with the products added by hand, compute what the run computed."""

import json
import os

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron.checkpointing.model_settings import checkpoint_folder
from megatron.checkpointing.reader import CheckpointReader
from megatron.model.gpt2_model import build_model
from megatron.neox_arguments import NeoXArgs
from tests.helpers.convert_folders import run_export
from tests.helpers.model_runs import batch
from tests.helpers.resharding import random_layers, settings_of, write_checkpoint
from tests.helpers.tolerances import FORWARD, assert_close
from tools.ckpts import export_lora, reshard

LORA = dict(rank=3, alpha=4.5, dropout=0.1, targets=["query_key_value", "dense", "linear1", "linear2"])
PLAIN = dict(
    use_bias_in_attn_linear=False, use_bias_in_mlp=False, norm="rmsnorm", activation="swiglu", pos_emb="rotary"
)
CASES = {
    "mistral": ("gqa gated rms", PLAIN),
    "mistral, attention only": ("gqa gated rms", {**PLAIN, "lora": {**LORA, "targets": ["query_key_value", "dense"]}}),
    "qwen3": ("gqa per_head", dict(PLAIN, zero_centered_gamma=False, use_bias_in_output_layer=False)),
    "llama, stretched": ("gqa gated rms", dict(PLAIN, hidden_size=96, rotary_denominator_scale=1.5)),
    "gpt_neox": ("mha gpt_j", dict(pos_emb="rotary")),
    "phi": ("gqa rpe", dict(pos_emb="rotary", gpt_j_residual=True, gpt_j_tied=True, rotary_pct=0.4)),
}
"""A variant of tests.helpers.resharding, and what makes it a model of the family."""


def saved(folder, case):
    """(the run's logits, its folder, the folder of its base, exported)"""
    variant, changes = CASES[case]
    settings = {**settings_of(variant, lora=LORA), **changes}
    args = NeoXArgs.from_dict(settings)
    model, layers = build_model(args).eval(), random_layers(args)
    for name, tensor in model.state_dict().items():
        _, index, rest = name.split(".", 2)
        tensor.copy_(layers[int(index)][rest])
    write_checkpoint(folder / "run", layers, settings)
    base = {
        index: {name: tensor for name, tensor in state.items() if ".lora." not in name}
        for index, state in layers.items()
    }
    write_checkpoint(folder / "base", base, {key: value for key, value in settings.items() if key != "lora"})
    run_export(folder / "base", folder / "hf", architecture=case.split(",")[0], tokenizer=False, vocab_size=128)
    with torch.no_grad():
        return model(batch()[0]), folder / "run", folder / "hf"


def exported(source, out, case):
    arguments = ["--input_dir", source, "--output_dir", out, "--base_model", "base", "--architecture"]
    assert export_lora.main([*map(str, arguments), case.split(",")[0]]) == 0
    return str(out)


def by_hand(model, folder):
    """The products added to the weights, by PEFT's names, in plain torch."""
    with open(os.path.join(folder, "adapter_config.json")) as file:
        config = json.load(file)
    tensors = load_file(os.path.join(folder, "adapter_model.safetensors"))
    weights = dict(model.named_parameters())
    for name in [name for name in tensors if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert module.rpartition(".")[2] in config["target_modules"] or module in config["target_modules"]
        B = tensors.pop(name.replace("lora_A", "lora_B"))
        A = tensors.pop(name)
        key = next((key for key in config["rank_pattern"] if module.endswith(key)), None)
        rank, alpha = (
            config["rank_pattern"].get(key, config["r"]),
            config["alpha_pattern"].get(key, config["lora_alpha"]),
        )
        assert A.shape[0] == rank
        with torch.no_grad():
            weights[f"{module}.weight"] += (alpha / rank * B.double() @ A.double()).float()
    assert not tensors
    return model


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("case", CASES)
def test_peft_and_plain_transformers_compute_what_the_run_did(case, tmp_path):
    expected, run, hf = saved(tmp_path, case)
    tokens = batch()[0][0]
    adapter = exported(run, tmp_path / "adapter", case)
    base = AutoModelForCausalLM.from_pretrained(hf)
    assert (logits(base, tokens) - expected).abs().max() > 1e-2, "the adapters are too small to be seen"
    adapted = PeftModel.from_pretrained(base, adapter)
    assert_close(logits(adapted, tokens), expected, FORWARD, "PEFT")
    plain = by_hand(AutoModelForCausalLM.from_pretrained(hf), adapter)
    assert_close(logits(plain, tokens), expected, FORWARD, "by hand")
    settings = adapted.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.lora_dropout) == (3, 4.5, 0.1)
    assert settings.base_model_name_or_path == "base"


def test_adapters_split_over_ranks_give_the_same_folder(tmp_path):
    _, run, _ = saved(tmp_path, "mistral")
    two = tmp_path / "two"
    assert reshard.main([str(run), str(two), "--model-parallel-size=2", "--pipe-parallel-size=0"]) == 0
    one, other = (exported(path, tmp_path / f"{path.name} adapter", "mistral") for path in (run, two))
    files = [load_file(os.path.join(folder, "adapter_model.safetensors")) for folder in (one, other)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert len(files[0]) == 2 * 2 * 7, "q, k, v, o, up, gate and down of two layers have an A and a B each"
    ranks = CheckpointReader(checkpoint_folder(str(two))).model_parallel_size
    assert ranks == 2
