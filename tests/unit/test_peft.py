"""Exported adapters: PEFT, and transformers' model with the products added by hand, compute what the run computed."""

import json
import os

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.checkpointing.model_settings import checkpoint_folder, inference_args
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.weights import load_weights_from
from megatron.model.gpt2_model import build_model
from megatron.neox_arguments import NeoXArgs
from tests.helpers.convert_folders import run_export
from tests.helpers.model_runs import batch
from tests.helpers.resharding import random_layers, read_all, settings_of, write_checkpoint
from tests.helpers.tolerances import FORWARD, assert_close
from tools.ckpts import export_lora, import_lora, reshard

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


def imported(base, adapter, out, case, *more):
    arguments = ["--input_dir", base, "--adapter", adapter, "--output_dir", out, "--architecture", case.split(",")[0]]
    return import_lora.main([*map(str, arguments), *more])


def logits_of(folder):
    """Of a checkpoint by its own configs, joined at one rank."""
    reader = CheckpointReader(checkpoint_folder(str(folder)))
    args = inference_args(reader, model_parallel_size=1, length=16)
    model = build_model(args).eval()
    load_weights_from(args, model, reader.folder)
    with torch.no_grad():
        return model(batch()[0])[..., :128], args


@pytest.mark.parametrize("case", ("mistral", "mistral, attention only", "phi", "gpt_neox"))
def test_there_and_back(case, tmp_path):
    expected, run, _ = saved(tmp_path, case)
    adapter = exported(run, tmp_path / "adapter", case)
    assert imported(tmp_path / "base", adapter, tmp_path / "back", case) == 0
    logits_there, args = logits_of(tmp_path / "back")
    assert_close(logits_there, expected, FORWARD)
    if case != "gpt_neox":  # of which the fused module's adapter has three times the rank
        first, last = (read_all(CheckpointReader(checkpoint_folder(str(each)))) for each in (run, tmp_path / "back"))
        assert first.keys() == last.keys() and all(torch.equal(first[key], last[key]) for key in first)
        assert args.lora == {"dropout": 0.1, **CASES[case][1].get("lora", LORA)}


@pytest.mark.parametrize("rslora", (False, True))
def test_an_adapter_that_peft_made(rslora, tmp_path):
    """Of some modules and layers only, with several ranks, onto a base that is split over two ranks."""
    _, _, hf = saved(tmp_path, "mistral")
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"down_proj": 2},
        alpha_pattern={"v_proj": 9}, use_rslora=rslora, init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(3)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(hf), config)
    adapted.save_pretrained(tmp_path / "adapter")
    two = tmp_path / "two"
    assert reshard.main([str(tmp_path / "base"), str(two), "--model-parallel-size=2", "--pipe-parallel-size=1"]) == 0
    assert imported(two, tmp_path / "adapter", tmp_path / "out", "mistral") == 0
    ours, args = logits_of(tmp_path / "out")
    assert_close(ours, logits(adapted, batch()[0][0]), FORWARD)
    assert args.lora["rank"] == 4 and args.lora["targets"] == ["query_key_value", "linear2"]


def test_adapters_that_are_refused(tmp_path, capsys):
    _, run, hf = saved(tmp_path, "mistral")

    def refusal(folder, base=tmp_path / "base"):
        assert imported(base, folder, tmp_path / "out", "mistral") == 1 and not (tmp_path / "out").exists()
        return capsys.readouterr().err

    def made(name, **settings):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(hf), LoraConfig(r=2, **settings))
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    plain = made("plain", target_modules=["q_proj"])
    assert "has adapters (lora); merge them first" in refusal(plain, run)
    assert "use_dora=True: only plain LoRA" in refusal(made("dora", target_modules=["q_proj"], use_dora=True))
    assert "bias='all'" in refusal(made("bias", target_modules=["q_proj"], bias="all"))
    assert "of linear layers alone: base_model.model.lm_head.base_layer" in refusal(
        made("head", target_modules=["lm_head"])
    )
    other = made("other", target_modules=["k_proj"])
    path = other / "adapter_model.safetensors"
    save_file({name.replace("k_proj", "x_proj"): tensor for name, tensor in load_file(path).items()}, path)
    assert "model.layers.0.self_attn.x_proj: no such module can have an adapter here" in refusal(other)
    assert "adapter_config.json cannot be read" in refusal(tmp_path / "nowhere")
    wide = {**settings_of("gqa gated rms"), **PLAIN, "head_dim": 14}
    write_checkpoint(tmp_path / "wide", random_layers(NeoXArgs.from_dict(wide)), wide)
    assert "q_proj: the adapter is of a weight [120, 88], the model's is [168, 88]" in refusal(plain, tmp_path / "wide")
