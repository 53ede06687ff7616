"""The converters' command lines: GPT-NeoX's options, tokenizers and special tokens, exit codes, words for the user."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatron.neox_arguments import NeoXArgs
from tests.helpers.convert_folders import assert_same_tensors, raw_config, saved
from tests.helpers.convert_models import VOCAB
from tools.ckpts import convert_hf_llama_to_neox, convert_hf_to_neox, convert_neox_to_hf, convert_te

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORDS = 110
"""Tokens; the model has VOCAB = 118 rows, as published models have more rows than tokens."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = saved(tmp_path_factory.mktemp("hf") / "tiny-mistral", bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<end>": 3, **{f"w{number}": number for number in range(4, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w4"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<pad>", "<s>", "</s>", "<end>")])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<end>", pad_token="<pad>")
    whole.chat_template = "{{ messages[0].content }}"
    whole.save_pretrained(folder)
    with open(os.path.join(folder, "generation_config.json"), "w") as file:
        json.dump({"temperature": 0.7, "do_sample": True, "eos_token_id": [2, 3]}, file)
    return folder


def neox(source, out, *more):
    return convert_hf_to_neox.main(["--input_dir", str(source), "--output_dir", str(out), *more])


def hf(checkpoint, out, *more):
    return convert_neox_to_hf.main(["--input_dir", str(checkpoint), "--output_dir", str(out), *more])


def test_there_and_back_with_the_tokenizer(source, tmp_path, capsys):
    assert neox(source, tmp_path / "ours", "--tp", "2", "--pp", "1") == 0
    assert "wrote" in capsys.readouterr().out
    settings = yaml.safe_load((tmp_path / "ours" / "model.yml").read_text())
    assert settings["vocab_file"] == str(tmp_path / "ours" / "huggingface" / "tokenizer.json")
    args = NeoXArgs.from_ymls([str(tmp_path / "ours" / "model.yml")])
    args.build_tokenizer()
    assert args.tokenizer.vocab_size == WORDS and args.padded_vocab_size == 256
    assert settings["eod_token"] == "<end>" and args.tokenizer.eod == 3  # not "</s>", which the vocabulary has too

    assert hf(tmp_path / "ours", tmp_path / "back") == 0
    assert_same_tensors(source, tmp_path / "back")
    config = raw_config(tmp_path / "back")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 3], 0)
    assert config["vocab_size"] == VOCAB
    generation = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert (generation["temperature"], generation["eos_token_id"], generation["pad_token_id"]) == (0.7, [2, 3], 0)
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, str(tmp_path / "back")))
    assert after("w7 w9 </s>").input_ids == before("w7 w9 </s>").input_ids == [7, 9, 2]
    assert after.chat_template == before.chat_template and after.eos_token == "<end>"
    model, found = AutoModelForCausalLM.from_pretrained(str(tmp_path / "back"), output_loading_info=True, dtype="auto")
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.head_dim == 10


def test_a_later_checkpoint_finds_the_tokenizer_by_its_config(source, tmp_path):
    """As after training with model.yml: elsewhere, with only configs/ beside the weights."""
    assert neox(source, tmp_path / "ours") == 0
    shutil.copytree(tmp_path / "ours" / "global_step0", tmp_path / "trained" / "global_step90")
    assert hf(tmp_path / "trained" / "global_step90", tmp_path / "back") == 0
    assert raw_config(tmp_path / "back")["vocab_size"] == VOCAB
    assert AutoTokenizer.from_pretrained(str(tmp_path / "back")).eos_token == "<end>"


def test_a_bare_tokenizer_json(source, tmp_path, capsys):
    """GPT-NeoX's way: vocab_file names a tokenizer.json with nothing beside it; its size cuts the padding off."""
    assert neox(source, tmp_path / "ours") == 0
    step = tmp_path / "alone" / "global_step0"
    shutil.copytree(tmp_path / "ours" / "global_step0", step)
    os.mkdir(tmp_path / "vocab")
    shutil.copy(os.path.join(source, "tokenizer.json"), tmp_path / "vocab" / "mine.json")
    path = step / "configs" / "model.yml"
    path.write_text(path.read_text().replace(str(tmp_path / "ours/huggingface/tokenizer.json"), "VOCAB"))
    own = tmp_path / "own.yml"
    own.write_text(path.read_text().replace("VOCAB", str(tmp_path / "vocab" / "mine.json")))
    shutil.rmtree(step / "configs")
    assert hf(step, tmp_path / "back") == 1
    assert "name its YAML files with --config_file" in capsys.readouterr().err
    assert hf(step, tmp_path / "back", "--config_file", str(own), "--vocab-is-hf-tokenizer") == 1
    assert "leave --vocab-is-hf-tokenizer out" in capsys.readouterr().err
    assert hf(step, tmp_path / "back", "--config_file", str(own), "--pad-token-id", "5") == 0
    config = raw_config(tmp_path / "back")
    assert (config["vocab_size"], config["eos_token_id"], config["pad_token_id"]) == (WORDS, 3, 5)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "back"))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer("w8").input_ids) == (3, 5, [8])
    assert hf(step, tmp_path / "none", "--config_file", str(own), "--no_save_tokenizer", "--vocab-size", "120") == 0
    assert raw_config(tmp_path / "none")["vocab_size"] == 120
    assert not [name for name in os.listdir(tmp_path / "none") if "token" in name]
    shutil.copy(os.path.join(source, "tokenizer_config.json"), tmp_path / "vocab")
    shutil.move(tmp_path / "vocab" / "mine.json", tmp_path / "vocab" / "tokenizer.json")
    own.write_text(own.read_text().replace("mine.json", "tokenizer.json"))
    assert hf(step, tmp_path / "flag", "--config_file", str(own), "--vocab-is-hf-tokenizer") == 0
    assert AutoTokenizer.from_pretrained(str(tmp_path / "flag")).pad_token == "<pad>"


def test_dry_run_prints_the_table_and_the_config_and_writes_nothing(source, tmp_path, capsys):
    assert neox(source, tmp_path / "ours", "--pp", "1") == 0
    capsys.readouterr()
    assert hf(tmp_path / "ours", tmp_path / "back", "--dry-run", "--precision", "bf16") == 0
    text = capsys.readouterr().out
    table, _, config = text.partition("\n{")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    assert ["model.layers.1.self_attn.k_proj.weight", "40 x 88", "bfloat16"] in [row[:3] for row in rows]
    assert rows[0] == ["model.embed_tokens.weight", "118 x 88", "bfloat16", "layer 0 word_embeddings.weight"]
    assert len(rows) == 21 and json.loads("{" + config)["head_dim"] == 10
    assert sorted(os.listdir(tmp_path)) == ["ours"]


def test_the_architecture_can_be_chosen_and_is_refused_with_reasons(source, tmp_path, capsys):
    assert neox(source, tmp_path / "ours") == 0
    for name, reason in (("llama", "hidden_size=88 with num_attention_heads=12"), ("neox", "norm=rmsnorm")):
        assert hf(tmp_path / "ours", tmp_path / "back", "--architecture", name) == 1
        message = capsys.readouterr().err
        assert reason in message and "mistral can hold it" in message and "Traceback" not in message
    assert hf(tmp_path / "ours", tmp_path / "back", "--architecture", "bert") == 1
    assert "choose one of neox, llama, mistral" in capsys.readouterr().err
    assert hf(tmp_path / "ours", tmp_path / "back", "--architecture", "mistral", "--precision", "fp16") == 0
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "back"), dtype="auto")
    assert type(model).__name__ == "MistralForCausalLM" and model.dtype == torch.float16


def test_the_llama_alias(source, tmp_path):
    options = ["--tp", "2", "--pp", "0", "--model", source, "--model_path", str(tmp_path / "ours")]
    assert convert_hf_llama_to_neox.main(options) == 0
    assert (tmp_path / "ours" / "latest").read_text() == "global_step0"
    assert hf(tmp_path / "ours", tmp_path / "back") == 0
    assert_same_tensors(source, tmp_path / "back")


def test_users_errors_have_an_exit_status_and_no_traceback(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model, words in (("/nowhere", "no such folder"), (str(tmp_path), "no config.json")):
        assert neox(model, tmp_path / "out") == 1
        assert words in capsys.readouterr().err
    assert convert_hf_to_neox.main(["--hf-model", "no/such", "--output_dir", str(tmp_path / "out")]) == 1
    assert "no/such is no folder here" in capsys.readouterr().err
    assert neox(source, tmp_path / "out", "--tp", "5") == 1
    assert "model_parallel_size=5" in capsys.readouterr().err
    assert hf(tmp_path, tmp_path / "out") == 1
    assert "holds no checkpoint" in capsys.readouterr().err
    for wrong in (["--tp", "0"], ["--pp", "-1"], ["--precision", "int8"], ["--hf-model", "too"]):
        with pytest.raises(SystemExit) as caught:
            neox(source, tmp_path / "out", *wrong)
        assert caught.value.code == 2
    capsys.readouterr()
    assert os.listdir(tmp_path) == []


def test_each_tool_starts_as_a_program():
    tools = ("convert_hf_to_neox", "convert_neox_to_hf", "convert_hf_llama_to_neox")
    processes = [
        subprocess.Popen(
            [sys.executable, os.path.join(ROOT, "tools", "ckpts", f"{name}.py"), "--help"],
            stdout=subprocess.PIPE,
            cwd="/",
            text=True,
        )
        for name in tools
    ]
    texts = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert all(option in texts[0] for option in ("--input_dir", "--hf-model", "--tp", "--pp", "--precision"))
    assert all(option in texts[1] for option in ("--config_file", "--vocab-is-hf-tokenizer", "--no_save_tokenizer"))
    assert all(option in texts[2] for option in ("--model ", "--model_path", "--tp", "--pp"))


def test_a_checkpoint_for_transformer_engine_is_sent_to_its_converter(source, tmp_path, capsys):
    assert neox(source, tmp_path / "ours") == 0
    assert convert_te.main([str(tmp_path / "ours"), str(tmp_path / "te"), "--to", "te"]) == 0
    capsys.readouterr()
    assert hf(tmp_path / "te", tmp_path / "back") == 1
    assert "convert_te.py" in capsys.readouterr().err and not (tmp_path / "back").exists()
    assert convert_te.main([str(tmp_path / "te"), str(tmp_path / "native"), "--to", "native"]) == 0
    assert hf(tmp_path / "native", tmp_path / "back", "--vocab-size", str(VOCAB)) == 0
    assert_same_tensors(source, tmp_path / "back")
