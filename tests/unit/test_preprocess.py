"""From text files to data sets: what is read, what is written, and that nothing is left behind by a failure."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import make_dataset
from megatron.errors import ConfigError, DataError
from tools.datasets import dataset_token_count, merge_datasets, preprocess_data, train_tokenizer
from tools.datasets.text_files import find_input_files, read_documents

ROOT = Path(__file__).parents[2]
TEXTS = ["first text", "second\nwith a line", "", "dritter Text: äöü"]


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path):
    return jsonl(tmp_path / "corpus.jsonl", [{"text": text, "title": text[:5]} for text in TEXTS])


def run(*paths, output, options=""):
    inputs = ",".join(str(path) for path in paths)
    arguments = f"--input {inputs} --tokenizer-type CharLevelTokenizer --output-prefix {output} {options}"
    preprocess_data.main(arguments.split())


def contents(prefix):
    """The documents of a character-level data set as bytes."""
    return [bytes(sequence.tolist()) for sequence in make_dataset(str(prefix))[:]]


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("append_eod", [False, True])
def test_each_document_is_one_sequence(workers, append_eod, corpus, tmp_path):
    run(corpus, output=tmp_path / "out", options=f"--workers {workers} {'--append-eod' if append_eod else ''}")
    end = b"\0" if append_eod else b""
    expected = [text.encode() + end for text in TEXTS if text]  # empty documents are left out
    assert contents(tmp_path / "out_text_document") == expected
    assert make_dataset(str(tmp_path / "out_text_document")).doc_idx.tolist() == [0, 1, 2, 3]


def test_many_documents_keep_their_order_over_workers(tmp_path):
    corpus = jsonl(tmp_path / "many.jsonl", [{"text": f"{number} " * (number % 7 + 1)} for number in range(700)])
    run(corpus, output=tmp_path / "out", options="--workers 2 --log-interval 10 --num-docs 700")
    expected = [(f"{number} " * (number % 7 + 1)).encode() for number in range(700)]
    assert contents(tmp_path / "out_text_document") == expected


def test_one_data_set_for_each_key(corpus, tmp_path):
    run(corpus, output=tmp_path / "out", options="--jsonl-keys text title")
    assert contents(tmp_path / "out_title_document") == [text[:5].encode() for text in TEXTS if text]
    assert len(contents(tmp_path / "out_text_document")) == 3


def test_every_kind_of_file(tmp_path):
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in" / "a.jsonl", [{"text": "one"}, {"text": "two"}]).write_text(
        '{"text": "one"}\n\n  \r\n{"text": "two"}'
    )
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    (tmp_path / "in" / "c.txt").write_bytes("four\r\nstill four é\n".encode())
    (tmp_path / "in" / "notes.md").write_text("not read")
    expected = [b"one", b"two", b"three", "four\r\nstill four é\n".encode()]
    run(tmp_path / "in", output=tmp_path / "folder")
    assert contents(tmp_path / "folder_text_document") == expected
    run(tmp_path / "in" / "c.txt", tmp_path / "in" / "a.jsonl", output=tmp_path / "list")
    assert contents(tmp_path / "list_text_document") == [expected[3], *expected[:2]]


def test_zstandard_files(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    if "zstandard" in sys.modules or _importable("zstandard"):
        import zstandard

        path.write_bytes(zstandard.compress(b'{"text": "one"}\n'))
        assert [document.texts["text"] for document in read_documents(str(path))] == ["one"]
    else:
        path.write_bytes(b"any")
        with pytest.raises(DataError, match="pip install zstandard"):
            list(read_documents(str(path)))


@pytest.mark.parametrize(
    "line, problem",
    [
        (b'{"text": "cut off', "not a JSON record"),
        (b'["a list"]', "must be a JSON object"),
        (b'{"body": "x"}', "key 'text' is missing"),
        (b'{"text": 5}', "key 'text' is int"),
        (b'{"text": null}', "key 'text' is NoneType"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800 half a pair"}', "surrogate"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_nothing_is_written(line, problem, workers, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 3 + line + b"\n" + b'{"text": "good"}\n')
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=f"bad.jsonl:4: .*{problem}"):
        run(path, output=tmp_path / "out" / "data", options=f"--workers {workers}")
    assert left_in(tmp_path / "out") == []


def test_a_failure_leaves_the_earlier_data_as_they_were(corpus, tmp_path):
    run(corpus, output=tmp_path / "data")
    before = {path: path.read_bytes() for path in tmp_path.glob("data_*")}
    with corpus.open("a") as stream:
        stream.write("{\n")
    with pytest.raises(DataError, match="corpus.jsonl:5"):
        run(corpus, output=tmp_path / "data")
    assert {path: path.read_bytes() for path in tmp_path.glob("data_*")} == before and len(before) == 2


def test_a_truncated_archive_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n' * 1000)[:-20])
    with pytest.raises(DataError, match="a.jsonl.gz: damaged or truncated"):
        list(read_documents(str(path)))


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        find_input_files("/nowhere.jsonl")
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(DataError, match="must end in .jsonl"):
        find_input_files(str(tmp_path / "a.pdf"))
    with pytest.raises(DataError, match="the folder has no .jsonl"):
        find_input_files(str(tmp_path))
    empty = jsonl(tmp_path / "empty.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match="no text"):
        run(empty, output=tmp_path / "out")
    assert left_in(tmp_path) == ["a.pdf", "empty.jsonl"]


def test_ftfy_is_used_or_asked_for(corpus, tmp_path):
    if _importable("ftfy"):
        path = jsonl(tmp_path / "broken.jsonl", [{"text": "schÃ¶n"}])
        run(path, output=tmp_path / "out", options="--ftfy")
        assert contents(tmp_path / "out_text_document") == ["schön".encode()]
    else:
        with pytest.raises(DataError, match="pip install ftfy"):
            run(corpus, output=tmp_path / "out", options="--ftfy")


def test_an_output_folder_that_cannot_be_made_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="--output-prefix"):
        run(corpus, output=tmp_path / "file" / "data")


def test_tokenizer_problems_come_before_any_work(corpus, tmp_path):
    with pytest.raises(ConfigError, match="vocab_file is unset"):
        preprocess_data.main(
            f"--input {corpus} --tokenizer-type HFTokenizer --output-prefix {tmp_path}/x --workers 2".split()
        )
    assert left_in(tmp_path) == ["corpus.jsonl"]


def test_the_command_lines_run_from_anywhere(corpus, tmp_path):
    """As a user runs them: exit code 0 and a line, or exit code 1 and one line of error."""
    train = [sys.executable, str(ROOT / "tools/datasets/train_tokenizer.py"), "--json_input_dir", str(corpus)]
    made = tmp_path / "tokenizer.json"
    subprocess.run([*train, "--tokenizer_output_path", str(made), "-v", "270"], cwd=tmp_path, check=True)
    command = [sys.executable, str(ROOT / "tools/datasets/preprocess_data.py"), "--input", str(corpus)]
    command += ["--tokenizer-type", "HFTokenizer", "--output-prefix", str(tmp_path / "d"), "--workers", "2"]
    done = subprocess.run([*command, "--vocab-file", str(made)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "3 documents" in done.stdout
    failed = subprocess.run([*command, "--vocab-file", "/nowhere"], cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.startswith("error: vocab_file=/nowhere not found")
    assert len(failed.stderr.splitlines()) == 1


def test_preparing_data_does_not_load_torch():
    code = "import sys, tools.datasets.corpora; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_train_tokenizer_command(corpus, tmp_path, capsys):
    train_tokenizer.main(
        f"--json_input_dir {corpus} --tokenizer_output_path {tmp_path}/t.json --vocab_size 265".split()
    )
    assert "265 tokens" in capsys.readouterr().out and (tmp_path / "t.json").is_file()


def test_merge_and_count(tmp_path, capsys):
    (tmp_path / "parts").mkdir()
    for name, text in (("b", "two"), ("a", "one"), ("c", "three")):
        run(jsonl(tmp_path / f"{name}.jsonl", [{"text": text}]), output=tmp_path / "parts" / name)
    merge_datasets.main(f"--input {tmp_path}/parts --output-prefix {tmp_path}/whole".split())
    assert contents(tmp_path / "whole") == [b"one", b"two", b"three"]
    dataset_token_count.main([str(tmp_path / "whole")])
    assert "whole: 11 tokens in 3 sequences" in capsys.readouterr().out
    (tmp_path / "parts" / "b_text_document.bin").unlink()
    with pytest.raises(DataError, match=r"b_text_document\.bin not found"):
        merge_datasets.merge(str(tmp_path / "parts"), str(tmp_path / "other"))
    assert not list(tmp_path.glob("other*"))


def _importable(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True
