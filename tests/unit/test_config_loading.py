"""Reading config files: merging, spelling, YAML's numbers, and clear errors for bad files."""

import json
import os

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments.loading import load_files, nearest, parse


def write(folder, name, text):
    path = os.path.join(str(folder), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def problems(*paths):
    with pytest.raises(ConfigError) as caught:
        load_files(paths)
    return caught.value.problems


def test_files_are_merged_and_their_text_is_kept(tmp_path):
    first = write(tmp_path, "model.yml", "# widths\nhidden-size: 64\noptimizer:\n  params: {lr: 1e-3}\n")
    second = write(tmp_path, "run.json", '{"train-iters": 7}')
    values, texts = load_files([first, second])
    assert values == {"hidden_size": 64, "optimizer": {"params": {"lr": 0.001}}, "train_iters": 7}
    assert texts == {"model.yml": open(first).read(), "run.json": open(second).read()}


@pytest.mark.parametrize("again", ["hidden_size", "hidden-size"])
@pytest.mark.parametrize("first_spelling", ["hidden_size", "hidden-size"])
def test_a_key_in_two_files_is_an_error_in_either_spelling(tmp_path, first_spelling, again):
    first = write(tmp_path, "a.yml", f"{first_spelling}: 64\n")
    second = write(tmp_path, "b.yml", f"{again}: 32\n")
    (problem,) = problems(first, second)
    assert again in problem and first in problem and second in problem


@pytest.mark.parametrize("name, text", [("a.yml", "x: 1\ny: 2\nx: 3\n"), ("a.json", '{"x": 1, "x": 3}')])
def test_a_key_twice_in_one_file_is_an_error(tmp_path, name, text):
    (problem,) = problems(write(tmp_path, name, text))
    assert name in problem and "x" in problem and "twice" in problem


def test_two_spellings_of_one_key_in_one_file_are_an_error(tmp_path):
    (problem,) = problems(write(tmp_path, "a.yml", "hidden-size: 1\nhidden_size: 2\n"))
    assert "hidden_size" in problem


def test_equal_base_names_are_an_error(tmp_path):
    first, second = write(tmp_path, "x/a.yml", "p: 1"), write(tmp_path, "y/a.yml", "q: 1")
    (problem,) = problems(first, second)
    assert first in problem and second in problem


def test_one_file_given_twice_is_reported_once(tmp_path):
    path = write(tmp_path, "a.yml", "p: 1\nq: 2")
    (problem,) = problems(path, path)
    assert "twice" in problem


def test_a_missing_file_names_its_neighbour(tmp_path):
    write(tmp_path, "qwen3-tiny.yml", "p: 1")
    (problem,) = problems(os.path.join(tmp_path, "qwen-tiny.yml"))
    assert "no such config file" in problem and "qwen3-tiny.yml" in problem


def test_all_bad_files_are_reported_together(tmp_path):
    found = problems(
        os.path.join(tmp_path, "missing.yml"),
        write(tmp_path, "bad.yml", "a: 1\nb: [1, 2\nc: 3\n"),
        write(tmp_path, "bad.json", '{"a": 1,\n "b": }'),
        write(tmp_path, "list.yml", "- 1\n- 2\n"),
        write(tmp_path, "number_key.yml", "12: 3\n"),
        str(tmp_path),
    )
    assert len(found) == 6
    assert "bad.yml, line 3" in found[1] or "bad.yml, line 4" in found[1]
    assert "bad.json, line 2" in found[2]
    assert "list" in found[3] and "12" in found[4] and "cannot be read" in found[5]


def test_a_file_that_is_not_text_is_reported(tmp_path):
    path = os.path.join(tmp_path, "a.yml")
    with open(path, "wb") as file:
        file.write(b"a: \xff\xfe\x00")
    (problem,) = problems(path)
    assert "UTF-8" in problem and path in problem


def test_an_unsafe_tag_does_not_run_code(tmp_path):
    path = write(tmp_path, "a.yml", f"a: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
    assert problems(path) and not os.path.exists(os.path.join(tmp_path, "made"))


@pytest.mark.parametrize(
    "text, value",
    [
        *(("1e-5", 1e-5), ("1E5", 1e5), ("-2e3", -2e3), ("1.0e-5", 1e-5), ("1.e5", 1e5), ("1.5e3", 1500.0)),
        *((".5", 0.5), ("-.5", -0.5), ("0.1", 0.1), ("3.", 3.0), ("+1e+2", 100.0), ("1_000.5", 1000.5)),
    ],
)
def test_floats_are_read_as_numbers(text, value):
    got = parse(f"x: {text}", "a.yml")["x"]
    assert type(got) is float and got == value


@pytest.mark.parametrize(
    "text", ["e5", "1e", "1e-", "1.2.3", ".", "1:30.5", "0x1p3", "1e5x", "2024-01-31", "'1e-5'", "inf", "nan"]
)
def test_what_only_resembles_a_float_stays_a_string(text):
    assert parse(f"x: {text}", "a.yml")["x"] == text.strip("'")


def test_whole_numbers_and_booleans_keep_their_type():
    assert parse("a: 10\nb: true\nc: null\nd: 1_000", "a.yml") == {"a": 10, "b": True, "c": None, "d": 1000}
    assert type(parse("b: true", "a.yml")["b"]) is bool


@pytest.mark.parametrize("name", ["a.yml", "a.json"])
def test_an_empty_file_sets_nothing(name):
    assert parse("", name) == {}


def test_json_and_yaml_agree():
    values = {"a": 1, "b": 1e-5, "c": [[["flash"], 2]], "d": {"e": None, "f": True}, "g": "text"}
    text = json.dumps(values, indent=1)
    assert parse(text, "a.json") == parse(text, "a.yml") == values


def test_nearest():
    assert nearest("num_atention_heads", ["num_layers", "num_attention_heads"]) == "num_attention_heads"
    assert nearest("xyz", ["num_layers"]) == ""
