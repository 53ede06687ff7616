"""Models whose tokenizer is a SentencePiece model and nothing else, as older Llamas and Mistrals had."""

import io
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import sentencepiece
import yaml
from transformers import AutoTokenizer

from megatron.convert.imported_tokenizer import tokenizer_settings
from megatron.errors import DataError
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import build_tokenizer
from tests.helpers.convert_folders import run_export, run_import, saved

TEXT = "the tiny model reads a few words of the text that it was trained on"
VOCAB = 118


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "source"
    saved(folder, eos_token_id=2, bos_token_id=1, pad_token_id=0)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, *TEXT.split()] * 20),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def test_a_tokenizer_model_alone(source, tmp_path):
    """It is copied, named in model.yml, works there, and goes out again."""
    said = []
    run_import(source, tmp_path / "ours", say=said.append)
    assert said == []
    kept = tmp_path / "ours" / "huggingface" / "tokenizer.model"
    assert kept.read_bytes() == (source / "tokenizer.model").read_bytes()
    settings = yaml.safe_load((tmp_path / "ours" / "model.yml").read_text())
    assert (settings["tokenizer_type"], settings["vocab_file"]) == ("SPMTokenizer", str(kept))
    assert "eod_token" not in settings, "none is named, so the model's own is the end"

    args = NeoXArgs.from_ymls([str(tmp_path / "ours" / "model.yml")])
    args.build_tokenizer()
    library = sentencepiece.SentencePieceProcessor(model_file=str(source / "tokenizer.model"))
    assert (
        args.tokenizer.tokenize(TEXT) == library.encode(TEXT)
        and args.tokenizer.detokenize(library.encode(TEXT)) == TEXT
    )
    assert args.tokenizer.eod == library.eos_id() == 2
    assert args.padded_vocab_size == 128 > args.tokenizer.vocab_size

    run_export(tmp_path / "ours", tmp_path / "back", say=said.append)
    assert said == ["tokenizer.model was copied, and there was no tokenizer_config.json to copy"]
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == kept.read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "back").encode(TEXT) == library.encode(TEXT)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == VOCAB


def test_tokens_that_only_transformers_adds_are_told(source, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    config = {"eos_token": {"content": "<end>"}, "bos_token": "<s>", "unk_token": "<unk>", "pad_token": None}
    config["added_tokens_decoder"] = {"2": {"content": "</s>"}, "60": {"content": "<tool>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 61, "<end>": 62}))
    said = []
    run_import(folder, tmp_path / "ours", say=said.append)
    (note,) = said
    assert note.startswith(
        "<end>, <pad>, <tool>: added to tokenizer.model by transformers, and unknown to SPMTokenizer"
    )
    text = (tmp_path / "ours" / "model.yml").read_text()
    assert f"# The tokenizer: {note}\n" in text and "eod_token" not in text
    args = NeoXArgs.from_ymls([str(tmp_path / "ours" / "model.yml")])
    args.build_tokenizer()
    assert args.tokenizer.eod == 2
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    settings, notes = tokenizer_settings(str(folder), str(folder))
    assert settings["eod_token"] == "</s>" and "<pad>" in notes[0]
    assert build_tokenizer(SimpleNamespace(**settings, merge_file=None)).eod == 2


def test_what_to_do_without_the_library_or_the_format(source, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # as tiktoken's are, under the same name
    settings, (note,) = tokenizer_settings(str(tmp_path), str(tmp_path))
    assert settings["tokenizer_type"] == "SPMTokenizer" and "is not a SentencePiece model" in note
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    settings, (note,) = tokenizer_settings(str(source), str(source))
    assert settings["tokenizer_type"] == "SPMTokenizer" and "pip install -r requirements/requirements-tok" in note
    with pytest.raises(DataError, match="'sentencepiece' is not installed"):
        build_tokenizer(SimpleNamespace(**settings, merge_file=None))


def test_without_any_tokenizer(source, tmp_path):
    (tmp_path / "empty").mkdir()
    settings, (note,) = tokenizer_settings(str(tmp_path / "empty"), "/kept")
    assert settings == {"tokenizer_type": "HFTokenizer", "vocab_file": "/kept"}
    assert note.endswith("put a tokenizer.json into /kept")
