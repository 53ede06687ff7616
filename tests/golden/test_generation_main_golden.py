"""generate.py as a program: every mode, from GPT-NeoX's own layer files, and its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import generate
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.neox_arguments.command_line import encode
from tests.golden import cases
from tests.golden.test_generation_golden import NEW_TOKENS, golden_texts
from tests.helpers.distributed import run_distributed

CASE = "case5_headdim32_gqa"
ROOT = Path(generate.__file__).parent


def _values(folder, **settings):
    values = yaml.safe_load((cases.DATA / CASE / "config.yml").read_text())
    return {**values, "load": str(folder), "maximum_tokens": NEW_TOKENS, "pipe_parallel_size": 0, **settings}


def _write_checkpoint(folder, tp):
    (folder / "latest").write_text("global_step0")
    (folder / "global_step0").mkdir()
    cases.write_checkpoint(CASE, tp, folder / "global_step0")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return _write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tp=1)


def _runs(rank, world_size, runs):
    """What generate.main does for each of `runs`: its records or its error."""
    outcomes = []
    for values in runs:
        try:
            outcomes.append(generate.main(["--megatron_config", encode(values)]))
        except (CheckpointError, ConfigError, DataError) as error:
            outcomes.append(error)
    return outcomes


def test_modes_and_errors(checkpoint, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("<>".join(bytes(prompt).decode() for prompt, _ in golden_texts(CASE)))
    long_prompt, samples = tmp_path / "long.txt", tmp_path / "samples.jsonl"
    long_prompt.write_text("x" * 32)
    from_file = dict(text_gen_type="input-file", sample_input_file=str(prompts), prompt_end="<>")
    sampled = dict(text_gen_type="unconditional", num_samples=2, temperature=1.0, sample_output_file=str(samples))
    runs = [
        _values(checkpoint, **from_file),
        _values(checkpoint, **from_file, pipe_parallel_size=1, sample_output_file=str(tmp_path / "named.jsonl")),
        _values(checkpoint, **sampled, return_logits=True),
        _values(checkpoint, **{**from_file, "sample_input_file": str(long_prompt)}),
        _values(checkpoint, text_gen_type="input-file", sample_input_file=str(tmp_path / "nowhere.txt")),
        _values(tmp_path / "no_checkpoint", **from_file),
        _values(checkpoint, **from_file, head_dim=16),
        {**_values(checkpoint, **from_file), "load": None},
    ]
    outcomes = run_distributed(1, _runs, runs, tmp_path=tmp_path)[0]

    expected = [dict(context=bytes(prompt).decode(), length=len(text)) for prompt, text in golden_texts(CASE)]
    for records, name in zip(outcomes[:2], ("prompts.txt.output.jsonl", "named.jsonl"), strict=True):
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert lines == records
        assert [{key: record[key] for key in expected[0]} for record in records] == expected
    assert [record["text"] for record in outcomes[0]] == [record["text"] for record in outcomes[1]]
    assert len(outcomes[2]) == len(samples.read_text().splitlines()) == 2
    for record in outcomes[2]:
        assert len(record["logits"]) == record["length"] and len(record["logits"][0]) == 512

    errors = [
        (DataError, "32 tokens leaves no room in seq_length=32"),
        (DataError, "nowhere.txt: No such file"),
        (CheckpointError, "no_checkpoint"),
        (CheckpointError, "attention.query_key_value.weight"),
        (ConfigError, "load is not set"),
    ]
    for outcome, (kind, words) in zip(outcomes[3:], errors, strict=True):
        assert isinstance(outcome, kind) and words in str(outcome), outcome


def test_two_ranks_trained_with_sequence_parallel(tmp_path):
    _write_checkpoint(tmp_path, tp=2)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(bytes(prompt).decode() for prompt, _ in golden_texts(CASE)))
    settings = dict(text_gen_type="input-file", sample_input_file=str(prompts), return_logits=True)
    run = _values(tmp_path, **settings, model_parallel_size=2, sequence_parallel=True)
    for (records,) in run_distributed(2, _runs, [run], tmp_path=tmp_path):
        for record, (_, golden) in zip(records, golden_texts(CASE), strict=True):
            assert torch.tensor(record["logits"]).argmax(-1).tolist() == golden


def test_started_by_hand_it_prints_text_or_one_error_line(checkpoint, tmp_path):
    def start(**settings):
        command = [sys.executable, "generate.py", "--megatron_config", encode(_values(checkpoint, **settings))]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        return subprocess.run(
            command, cwd=ROOT, env=environment, input="Hello\n", capture_output=True, text=True, timeout=100
        )

    good = start(text_gen_type="interactive")
    assert good.returncode == 0, good.stderr
    assert "Prompt >>> " in good.stdout and "KV cache of rank 0: 20,480 bytes" in good.stdout
    bad = start(text_gen_type="input-file", sample_input_file=str(tmp_path / "nowhere.txt"))
    assert bad.returncode == 1 and "Traceback" not in bad.stderr
    assert [line for line in bad.stderr.splitlines() if line.startswith("error: ")][0].count("nowhere.txt") == 1
