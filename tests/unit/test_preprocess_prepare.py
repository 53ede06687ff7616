"""prepare_data.py: a corpus that needs no network, or a local file; made once, and again only when asked."""

import json
import shutil

import pytest

import prepare_data
from megatron.data.indexed_dataset import make_dataset
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.huggingface import HFTokenizer
from tools.datasets import corpora


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare_data.main(f"pydocs -d {folder} --max-bytes 300000 --vocab-size 600 --workers 1".split())
    return folder


def prepare(folder, options="pydocs --max-bytes 300000 --vocab-size 600 --workers 1"):
    prepare_data.main(f"{options} -d {folder}".split())


def files_and_times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def read(folder):
    class Args:
        tokenizer_type, vocab_file = "HFTokenizer", str(folder / "tokenizer.json")

    tokenizer = HFTokenizer.from_args(Args)
    return tokenizer, make_dataset(str(folder / f"{folder.name}_text_document"))


def test_pydocs_is_the_standard_library_and_its_help(made):
    assert sorted(files_and_times(made / "pydocs")) == [
        "manifest.json",
        "pydocs_text_document.bin",
        "pydocs_text_document.idx",
        "tokenizer.json",
    ]
    tokenizer, dataset = read(made / "pydocs")
    assert tokenizer.vocab_size == 600
    assert all(sequence[-1] == tokenizer.eod and (sequence[:-1] != tokenizer.eod).all() for sequence in dataset[:])
    texts = {document.texts["text"] for document in corpora.pydocs()}
    decoded = [tokenizer.detokenize(sequence.tolist()) for sequence in dataset[:]]
    assert set(decoded) <= texts
    total = sum(len(text.encode()) for text in decoded)
    assert 250_000 < total <= 300_000
    assert 2 < total / len(tokenizer.tokenize("".join(decoded))) < 6  # bytes a token: it has learnt something


def test_pydocs_is_enough_for_the_demo_by_default():
    documents = list(corpora.limit_bytes(corpora.pydocs(), corpora.PYDOCS_BYTES))
    size = sum(len(document.texts["text"].encode()) for document in documents)
    assert 5_000_000 < size <= corpora.PYDOCS_BYTES
    # The last documents are the validation set: they must be like the others, not one folder or the help alone.
    for part in (documents[: len(documents) // 10], documents[-len(documents) // 10 :]):
        kinds = [document.place.startswith("pydoc topic") for document in part]
        assert any(kinds) and not all(kinds)
    assert [document.place for document in corpora.pydocs()][: len(documents)] != sorted(
        document.place for document in documents
    )


def test_a_second_run_makes_nothing(made, capsys):
    before = files_and_times(made / "pydocs")
    prepare(made)
    assert files_and_times(made / "pydocs") == before
    out = capsys.readouterr().out
    assert "complete already" in out and f"data_path: {made}/pydocs/pydocs_text_document" in out


@pytest.mark.parametrize(
    "change", ["--force", "--max-bytes 200000", "--vocab-size 500", "missing file", "truncated file", "no manifest"]
)
def test_what_is_made_again(change, made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    data = tmp_path / "pydocs" / "pydocs_text_document.bin"
    options = "pydocs --max-bytes 300000 --vocab-size 600 --workers 1"
    if change == "missing file":
        data.unlink()
    elif change == "truncated file":
        data.write_bytes(data.read_bytes()[:-2])
    elif change == "no manifest":
        (tmp_path / "pydocs" / "manifest.json").write_text("{")
    else:
        options += f" {change}"
    prepare(tmp_path, options)
    assert data.stat().st_ino != (made / "pydocs" / data.name).stat().st_ino
    same = data.read_bytes() == (made / "pydocs" / data.name).read_bytes()
    assert same == (not change.startswith(("--max", "--vocab")))  # the same request gives the same bytes
    prepared = files_and_times(tmp_path / "pydocs")
    prepare(tmp_path, options.replace("--force", ""))
    assert files_and_times(tmp_path / "pydocs") == prepared
    assert len(prepared) == 4


def test_a_failed_run_leaves_tokenizer_and_data_together(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "pydocs").iterdir()}

    def fail(*args, **kwargs):
        raise DataError("disk full")

    monkeypatch.setattr(corpora, "preprocess", fail)
    with pytest.raises(DataError, match="disk full"):
        prepare(tmp_path, "pydocs --max-bytes 200000 --vocab-size 500 --workers 1")
    assert {path.name: path.read_bytes() for path in (tmp_path / "pydocs").iterdir()} == before


def test_a_local_file(tmp_path):
    source = tmp_path / "stories.v2.jsonl"
    source.write_text("".join(json.dumps({"text": f"story {number} " * 20}) + "\n" for number in range(30)))
    prepare(tmp_path / "data", f"{source} --vocab-size 300 --workers 1")
    tokenizer, dataset = read(tmp_path / "data" / "stories")
    assert len(dataset) == 30 and tokenizer.detokenize(dataset[7].tolist()) == "story 7 " * 20
    before = files_and_times(tmp_path / "data" / "stories")
    prepare(tmp_path / "data", f"{source} --vocab-size 300 --workers 1")
    assert files_and_times(tmp_path / "data" / "stories") == before
    source.write_text(source.read_text() + '{"text": "one more"}\n')
    prepare(tmp_path / "data", f"{source} --vocab-size 300 --workers 1")
    assert len(read(tmp_path / "data" / "stories")[1]) == 31


def test_with_a_tokenizer_that_is_there(made, tmp_path):
    vocab = made / "pydocs" / "tokenizer.json"
    prepare(tmp_path, f"pydocs --max-bytes 50000 --workers 1 -t HFTokenizer -v {vocab}")
    assert not (tmp_path / "pydocs" / "tokenizer.json").exists()
    prepare(tmp_path, "pydocs --max-bytes 50000 --workers 1 -t CharLevelTokenizer")
    assert max(make_dataset(f"{tmp_path}/pydocs/pydocs_text_document")[0]) < 256


@pytest.mark.parametrize("name", corpora.DOWNLOADED_BY_GPT_NEOX)
def test_what_gpt_neox_downloads_is_refused_with_advice(name, tmp_path):
    with pytest.raises(ConfigError, match=rf"nothing is downloaded.*prepare_data.py path/to/{name}.jsonl"):
        prepare(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_other_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="nosuch.jsonl.*neither 'pydocs' nor a file"):
        prepare(tmp_path, "nosuch.jsonl")
    with pytest.raises(ConfigError, match="vocab_file is unset"):
        prepare(tmp_path, "pydocs -t GPT2BPETokenizer")
