"""What import and export refuse, and what a failure half way leaves: nothing under the final name."""

import importlib
import json
import multiprocessing
import os
import resource
import signal
from functools import partial

import pytest
import torch

from megatron.errors import CheckpointError, ConfigError, ConversionError
from tests.helpers.convert_folders import (
    assert_same_tensors,
    change_config,
    change_tensors,
    raw_config,
    run_export,
    run_import,
    saved,
)
from tests.helpers.convert_models import VOCAB


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("hf") / "source")


def test_fp16_that_would_be_infinite_is_refused(tmp_path):
    folder = saved(tmp_path / "hf", dtype=torch.bfloat16)
    change_tensors(folder, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].fill_(1e5))
    with pytest.raises(ConversionError, match="mlp.linear2.weight: fp16 holds no numbers above 65504"):
        run_import(folder, tmp_path / "ours", precision="fp16")
    assert sorted(os.listdir(tmp_path)) == ["hf"]


def test_a_tied_head_that_differs_is_refused(tmp_path):
    folder = saved(tmp_path / "hf", tie_word_embeddings=True)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(VOCAB, 88)}))
    with pytest.raises(ConversionError, match="lm_head.weight: differs .* set tie_word_embeddings to false"):
        run_import(folder, tmp_path / "ours")


def test_all_problems_of_a_source_are_listed_and_nothing_is_written(tmp_path):
    folder = saved(tmp_path / "hf")

    def damage(tensors):
        del tensors["model.layers.0.self_attn.q_proj.weight"], tensors["lm_head.weight"]
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(45, 88)
        tensors["model.layers.1.self_attn.sinks"] = torch.zeros(12)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(44, 88)
        tensors["model.norm.weight"] = torch.ones(88, dtype=torch.int8)

    change_tensors(folder, damage)
    with pytest.raises(ConversionError) as caught:
        run_import(folder, tmp_path / "ours")
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 6
    for wanted in (
        "layers.0.self_attn.q_proj.weight: missing",
        "lm_head.weight: missing",
        "layers.1.mlp.up_proj.weight: shape [45, 88], where the config makes it [44, 88]",
        "layers.1.self_attn.sinks: not used by a MistralForCausalLM",
        "layers.2.mlp.up_proj.weight: not used",
        "model.norm.weight: dtype int8",
    ):
        assert any(wanted in line for line in lines), wanted
    assert sorted(os.listdir(tmp_path)) == ["hf"]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="falcon_mamba"), "model_type=falcon_mamba cannot be converted; can be: llama"),
        (dict(model_type=...), "model_type is not in config.json"),
        (dict(quantization_config={"quant_method": "gptq", "bits": 4}), "the weights are quantised"),
        (dict(vocab_size=117), r"embed_tokens.weight: shape \[118, 88\], where the config makes it \[117, 88\]"),
        (dict(head_dim=20), r"q_proj.weight: shape \[120, 88\], where the config makes it \[240, 88\]"),
        (dict(hidden_act="xielu"), "hidden_act=xielu"),
    ],
)
def test_configs_that_are_refused(source, changes, message, tmp_path):
    os.mkdir(tmp_path / "hf")
    os.link(os.path.join(source, "model.safetensors"), tmp_path / "hf" / "model.safetensors")
    with open(tmp_path / "hf" / "config.json", "w") as file:
        json.dump(raw_config(source), file)
    change_config(tmp_path / "hf", **changes)
    with pytest.raises(ConversionError, match=message):
        run_import(tmp_path / "hf", tmp_path / "ours")
    assert sorted(os.listdir(tmp_path)) == ["hf"]


def test_sources_that_are_none(source, tmp_path):
    for folder, message in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "has no config.json")):
        with pytest.raises(ConversionError, match=message):
            run_import(folder, tmp_path / "ours")
    os.mkdir(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text("{")
    with pytest.raises(ConversionError, match="not readable JSON"):
        run_import(tmp_path / "hf", tmp_path / "ours")
    with open(tmp_path / "hf" / "config.json", "w") as file:
        json.dump(raw_config(source), file)
    with pytest.raises(ConversionError, match="has no weights"):
        run_import(tmp_path / "hf", tmp_path / "ours")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ConversionError, match="missing: model-1.safetensors"):
        run_import(tmp_path / "hf", tmp_path / "ours")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(ConversionError, match="not a file beside it"):
        run_import(tmp_path / "hf", tmp_path / "ours")
    whole = open(os.path.join(source, "model.safetensors"), "rb").read()
    for content in (whole[:-1], whole[:100], b"", whole[:8] + b"x" + whole[9:]):
        (tmp_path / "hf" / "model.safetensors").write_bytes(content)
        with pytest.raises(ConversionError, match="cut short|not a readable safetensors file"):
            run_import(tmp_path / "hf", tmp_path / "ours")


def test_a_bin_file_runs_nothing(source, tmp_path):
    os.mkdir(tmp_path / "hf")
    with open(tmp_path / "hf" / "config.json", "w") as file:
        json.dump(raw_config(source), file)

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    torch.save({"model.norm.weight": Attack()}, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is refused"):
        run_import(tmp_path / "hf", tmp_path / "ours")
    assert not (tmp_path / "attacked").exists()


def test_layouts_that_do_not_split_are_refused(source, tmp_path):
    with pytest.raises(ConfigError, match="num_attention_heads"):
        run_import(source, tmp_path / "ours", model_parallel_size=5)
    assert not os.listdir(tmp_path)


def test_nothing_is_overwritten(source, tmp_path):
    (tmp_path / "ours").mkdir()
    folder = run_import(source, tmp_path / "ours")  # an empty folder is none
    for again in (lambda: run_import(source, tmp_path / "ours"), lambda: run_export(folder, tmp_path / "ours")):
        with pytest.raises(ConversionError, match="is there already"):
            again()


def test_export_refuses_a_checkpoint_that_does_not_fit_its_config(source, tmp_path):
    folder = run_import(source, tmp_path / "ours", pipe_parallel_size=1, model_parallel_size=2)
    path = os.path.join(folder, "layer_03-model_01-model_states.pt")
    state = torch.load(path)
    state["attention.proj_in.weight"] = state.pop("attention.dense.weight")
    state["mlp.linear2.weight"] = state["mlp.linear2.weight"][:, :20].clone()
    torch.save(state, path)
    with pytest.raises(CheckpointError) as caught:
        run_export(folder, tmp_path / "back")
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 3
    assert "layer 3 mlp.linear2.weight: shape [88, 20] in the checkpoint, [88, 22] by the config" in str(caught.value)
    assert not (tmp_path / "back").exists()


def test_damaged_weights_are_not_passed_on(source, tmp_path):
    folder = run_import(source, tmp_path / "ours", pipe_parallel_size=1)
    path = os.path.join(folder, "layer_03-model_00-model_states.pt")
    needle = torch.load(path)["mlp.linear2.weight"].numpy().tobytes()[:16]
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(content.replace(needle, bytes(16)))
    with pytest.raises(CheckpointError, match="does not have its checksum"):
        run_export(folder, tmp_path / "back")
    assert not [name for name in os.listdir(tmp_path) if name.startswith("back")]


FORK = multiprocessing.get_context("fork")
"""No model is built or run in these processes, so no thread is missed, and they start at once."""


def _limited(calls, most, said):
    """Run each call with files of at most `most` bytes, as on a full disk; says how each ended."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    for call in calls:
        try:
            call()
            said.put("finished")
        except (ConversionError, CheckpointError) as error:
            said.put(str(error))


def test_a_full_disk_leaves_nothing(source, tmp_path):
    folder, out = run_import(source, tmp_path / "ours"), tmp_path / "out"
    layouts = [dict(pipe_parallel_size=pp, make_vocab_size_divisible_by=700) for pp in (0, 1)]
    calls = [partial(run_import, source, out, **layout) for layout in layouts] + [partial(run_export, folder, out)]
    said = FORK.SimpleQueue()
    process = FORK.Process(target=_limited, args=(calls, 200_000, said))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    for _ in calls:
        message = said.get()
        assert ("cannot be written" in message or "is the disk full?" in message) and "File too large" in message
    assert sorted(os.listdir(tmp_path)) == ["ours"]


def _killed(call, module, name, after):
    """Run until the function of that name has been called `after` times."""
    owner, calls = vars(importlib.import_module(module))[name], []
    original = owner.write if name == "HFWriter" else owner.add

    def counting(self, *arguments):
        calls.append(0)
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)

    setattr(owner, original.__name__, counting)
    call()


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_kill_leaves_no_half_output_and_is_cleared_away(source, direction, tmp_path):
    folder = run_import(source, tmp_path / "ours")
    if direction == "import":
        call = partial(run_import, source, tmp_path / "out", pipe_parallel_size=1)
        where = ("megatron.checkpointing.streamed_file", "StreamedFile")
    else:
        call, where = partial(run_export, folder, tmp_path / "out"), ("megatron.convert.hf_writer", "HFWriter")
    process = FORK.Process(target=_killed, args=(call, *where, 9))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["ours", "out.unfinished"]
    call()
    assert sorted(os.listdir(tmp_path)) == ["ours", "out"]
    if direction == "export":
        assert_same_tensors(source, tmp_path / "out")
