"""Prompts in, records and files out, over the toy rule of test_generation_stream."""

import io
import json
import os
from types import SimpleNamespace

import pytest

from megatron.errors import ConfigError, DataError
from megatron.text_generation import (
    generate_samples_from_prompt,
    generate_samples_input_from_file,
    generate_samples_interactive,
    generate_samples_unconditional,
    stream_tokens,
)
from megatron.text_generation.console import LiveText, readable
from megatron.text_generation.prompts import read_prompts
from megatron.text_generation.records import make_records
from tests.unit.test_generation_stream import EOS, LIMIT, VOCABULARY, ToyRunner, plain_greedy, toy_args, toy_logits

LETTERS = "\0abcdefghijklmnopqrstuv"


def letter_args(**changes):
    """One letter, one token."""
    tokenizer = SimpleNamespace(
        eod=EOS,
        vocab_size=VOCABULARY,
        tokenize=lambda text: [LETTERS.index(letter) for letter in text],
        detokenize=lambda tokens: "".join(dict(enumerate(LETTERS))[token] for token in tokens),
    )
    return toy_args(tokenizer=tokenizer, **changes)


def expected_text(prompt, steps=64, eos=EOS):
    tokens = [LETTERS.index(letter) for letter in prompt] or [eos]
    return "".join(LETTERS[token] for token in plain_greedy(tokens, steps, eos)[0])


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records():
    args = letter_args()
    records = generate_samples_from_prompt(args, ToyRunner(), ["abc", "b"], maximum_tokens=5)
    assert [record["context"] for record in records] == ["abc", "b"]
    for record in records:
        assert list(record) == ["context", "text", "length", "finished", "message", "duration_seconds"]
        assert record["text"] == expected_text(record["context"], 5) and record["length"] == len(record["text"])
        assert record["duration_seconds"] > 0 and record["message"] is None
    assert generate_samples_from_prompt(args, ToyRunner(), "b", maximum_tokens=5)[0]["text"] == records[1]["text"]


def test_one_cache_serves_all_prompts():
    runner = ToyRunner()
    generate_samples_from_prompt(letter_args(), runner, ["a", "abcdef", "ab"], maximum_tokens=5)
    assert runner.starts[0] == (1, 6 + 5 - 1, True)


def test_context_length_is_told():
    record = generate_samples_from_prompt(letter_args(), ToyRunner(), "abc", eos_token_id=VOCABULARY)[0]
    assert record["length"] == LIMIT - 3 and not record["finished"]
    assert record["message"] == f"stopped at the context length, seq_length={LIMIT}"


def test_maximum_tokens_up_to_the_context_length_is_no_reason_for_a_message_before_it():
    record = generate_samples_from_prompt(letter_args(), ToyRunner(), "abc", eos_token_id=VOCABULARY, maximum_tokens=12)
    assert record[0]["length"] == 12 and record[0]["message"] is None


def test_text_that_ends_at_once_is_told():
    first = plain_greedy([1, 2], 1, eos=-1)[0][0]
    record = generate_samples_from_prompt(letter_args(), ToyRunner(), "ab", eos_token_id=first)[0]
    assert (record["text"], record["length"], record["finished"]) == (None, 0, True)
    assert "did not start" in record["message"]


def test_token_without_text_is_told():
    args = letter_args()
    args.tokenizer.vocab_size = VOCABULARY + 9  # the toy's padded columns win
    record = generate_samples_from_prompt(args, ToyRunner(), "ab", maximum_tokens=2)[0]
    assert record["text"] is None and record["length"] == 2 and "not in the tokenizer" in record["message"]


def test_logits_of_each_token_of_the_text():
    record = generate_samples_from_prompt(letter_args(return_logits=True), ToyRunner(), "abc", maximum_tokens=4)[0]
    tokens = [LETTERS.index(letter) for letter in "abc" + record["text"]]
    assert len(record["logits"]) == record["length"] > 0
    for place, logits in enumerate(record["logits"], 3):
        assert logits == toy_logits(tokens[:place])[:VOCABULARY].tolist()


def test_logits_of_rows_that_start_later():
    args = letter_args(return_logits=True)
    *_, state = stream_tokens(args, ToyRunner(), [[5], [7, 3, 9]], maximum_tokens=6, eos_token_id=VOCABULARY)
    for row, record in enumerate(make_records(args, ["e", "gci"], state, 1.0)):
        tokens = state.tokens[row].tolist()
        assert record["length"] == len(record["logits"]) == [6, 4][row]
        for place, logits in enumerate(record["logits"], [1, 3][row]):
            assert logits == toy_logits(tokens[:place])[:VOCABULARY].tolist()


@pytest.mark.parametrize("options", [{}, dict(temperature=2.0), dict(temperature=1.5, top_k=5, top_p=0.9)])
def test_prompts_in_a_row_give_what_each_gives_alone(options):
    prompts = ["abc", "b", "", "ab"]
    together = generate_samples_from_prompt(letter_args(), ToyRunner(), prompts, **options)
    for prompt, record in zip(prompts, together, strict=True):
        alone = generate_samples_from_prompt(letter_args(), ToyRunner(), prompt, **options)[0]
        assert record["text"] == alone["text"]


def test_unconditional_samples_differ_and_repeat(tmp_path):
    def texts(seed):
        output = tmp_path / "samples.txt"
        generate_samples_unconditional(letter_args(seed=seed), ToyRunner(), 4, str(output), temperature=3.0)
        return [record["text"] for record in read_lines(output)]

    assert len(set(texts(1))) == 4
    assert texts(1) == texts(1) != texts(2)


def test_unconditional_starts_at_end_of_text():
    records = generate_samples_unconditional(letter_args(), ToyRunner(), 1, None)
    assert records[0]["context"] == "" and (records[0]["text"] or "") == expected_text("")


def test_file_mode_writes_beside_the_input_and_prints(tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n\n  b \nca")
    records = generate_samples_input_from_file(letter_args(), ToyRunner(), str(prompts), maximum_tokens=5)
    output = tmp_path / "prompts.txt.output.jsonl"
    assert read_lines(output) == records
    assert [record["context"] for record in records] == ["abc", "b", "ca"]
    printed = capsys.readouterr().out
    for record in records:
        assert f"prompt: {record['context']}\ntext:   {record['text']}\n" in printed
    assert "3 of 3" in printed and "tokens/s" in printed and str(output) in printed
    assert sorted(os.listdir(tmp_path)) == ["prompts.txt", "prompts.txt.output.jsonl"], "a temporary file is left"


def test_prompts_end_with_prompt_end(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo<end>\n\nthree <end>\n")
    assert read_prompts(str(path), "<end>") == ["one\ntwo", "three"]


def test_failed_run_leaves_the_earlier_output(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("earlier")

    class Failing(ToyRunner):
        def next_token_logits(self, tokens, position_ids):
            if len(self.starts) > 2:
                raise RuntimeError("stopped on the way")
            return super().next_token_logits(tokens, position_ids)

    (tmp_path / "prompts.txt").write_text("a\nb\nc")
    with pytest.raises(RuntimeError, match="on the way"):
        generate_samples_input_from_file(letter_args(), Failing(), str(tmp_path / "prompts.txt"), str(output))
    assert output.read_text() == "earlier"
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "prompts.txt"]


@pytest.mark.parametrize(
    "content, prompt_end, error, words",
    [
        (None, "\n", DataError, "prompts.txt: No such file"),
        (b"", "\n", DataError, "holds no prompt"),
        (b" \n\n", "\n", DataError, "holds no prompt"),
        (b"\xff\xfe\x00", "\n", DataError, "not UTF-8"),
        (b"a", "", ConfigError, "prompt_end=''"),
        (b"a\n" + b"b" * LIMIT, "\n", DataError, f"{LIMIT} tokens leaves no room in seq_length={LIMIT}.*bbb"),
    ],
)
def test_bad_prompt_file_is_named_before_anything_runs(tmp_path, content, prompt_end, error, words):
    path, runner = tmp_path / "prompts.txt", ToyRunner()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=words):
        generate_samples_input_from_file(letter_args(), runner, str(path), prompt_end=prompt_end)
    assert runner.fed == [] and not list(tmp_path.glob("*jsonl*"))


def test_input_file_must_be_named():
    with pytest.raises(ConfigError, match="sample_input_file is not set"):
        generate_samples_input_from_file(letter_args(), ToyRunner(), None)


@pytest.mark.parametrize("name", ["no/such/folder/out.jsonl", "."])
def test_output_that_cannot_be_written_is_named_before_anything_runs(tmp_path, name):
    runner = ToyRunner()
    with pytest.raises(ConfigError, match="sample_output_file="):
        generate_samples_unconditional(letter_args(), runner, 1, str(tmp_path / name))
    assert runner.fed == []


@pytest.mark.parametrize("options", [dict(number_of_samples=0), dict(maximum_tokens=0), dict(top_p=2.0)])
def test_bad_settings_leave_no_file(tmp_path, options):
    with pytest.raises(ConfigError):
        generate_samples_unconditional(letter_args(), ToyRunner(), output_file=str(tmp_path / "out"), **options)
    assert os.listdir(tmp_path) == []


def type_lines(monkeypatch, *lines):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_interactive_answers_each_prompt_until_the_input_ends(monkeypatch, capsys):
    type_lines(monkeypatch, "abc", "a" * LIMIT, "b")
    generate_samples_interactive(letter_args(), ToyRunner(), maximum_tokens=5)
    printed = capsys.readouterr().out
    for prompt in ("abc", "b"):
        assert f"{expected_text(prompt, 5)}\n" in printed
    assert f"{LIMIT} tokens leaves no room" in printed


def test_interactive_prompt_of_several_lines(monkeypatch, capsys):
    monkeypatch.setattr("tests.unit.test_generation_samples.LETTERS", LETTERS.replace("v", "\n"))
    type_lines(monkeypatch, "a", "bc###ignored", "half a prompt")
    generate_samples_interactive(letter_args(), ToyRunner(), maximum_tokens=5, prompt_end="###")
    assert expected_text("a\nbc", 5) in capsys.readouterr().out


def test_live_text_holds_back_an_unfinished_character(capsys):
    live = LiveText()
    for text in ("a", "a\N{REPLACEMENT CHARACTER}", "aé", "aéb"):
        live.update(text)
    live.finish("aéb")
    assert capsys.readouterr().out == "aéb\n"


def test_console_spells_control_characters_out():
    assert readable("a\x1b[2Jb\r\n\té\x9b") == "a\\x1b[2Jb\\x0d\n\té\\x9b"
