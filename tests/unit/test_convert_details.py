"""Parts of conversion on their own: fused rows, streamed files, work ahead, the spelling of older configs."""

import json
import os
import shutil
import threading

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron.checkpointing.streamed_file import StreamedFile, save_file
from megatron.convert.ahead import Ahead
from megatron.convert.families import FAMILIES
from megatron.convert.memory import give_back
from megatron.convert.older_config import older_keys
from tests.helpers.convert_folders import assert_same_tensors, raw_config, run_export, run_import, saved
from tests.helpers.convert_models import VOCAB, hf_config, our_args

MHA = dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=4, head_dim=6, sliding_window=None)
"""Fused head by head; also what a Llama could be."""


def test_heads_fused_one_by_one_and_the_type_it_came_from(tmp_path):
    source = saved(tmp_path / "hf", **MHA)
    folder = run_import(source, tmp_path / "ours", model_parallel_size=2, pipe_parallel_size=1)
    run_export(folder, tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    assert raw_config(tmp_path / "back")["model_type"] == "mistral"
    shutil.rmtree(tmp_path / "ours" / "huggingface")  # nothing says what it was
    run_export(folder, tmp_path / "chosen", vocab_size=VOCAB)
    assert_same_tensors(source, tmp_path / "chosen")
    assert raw_config(tmp_path / "chosen")["model_type"] == "llama"


@pytest.mark.parametrize("mmap", [False, True])
def test_a_streamed_file_is_torch_s(mmap, tmp_path):
    path = str(tmp_path / "file.pt")
    large = torch.arange(1_000_000, dtype=torch.float32)
    tensors = {
        "part": large[500:520],
        "turned": torch.arange(6).view(2, 3).T,
        "scalar": torch.tensor(2.5).bfloat16(),
        "empty": torch.empty(0, 4).half(),
        "bytes": torch.tensor([1, 255], dtype=torch.uint8),
    }
    with StreamedFile(path) as file:
        early = {name: file.add(tensor) for name, tensor in tensors.items()}
        file.finish({"module": early, "late": large[:3], "plain": [1, "two", {"three": None}]})
    assert os.path.getsize(path) < 10_000, "of a part of a tensor, not all of it"
    found = torch.load(path, weights_only=True, mmap=mmap)
    assert found["plain"] == [1, "two", {"three": None}] and torch.equal(found["late"], large[:3])
    assert list(found["module"]) == list(tensors)
    for name, tensor in tensors.items():
        assert found["module"][name].dtype == tensor.dtype and torch.equal(found["module"][name], tensor), name


def test_a_streamed_file_that_fails_is_left_quietly(tmp_path):
    with pytest.raises(ValueError, match="on purpose"), StreamedFile(str(tmp_path / "file.pt")) as file:
        file.add(torch.ones(3))
        raise ValueError("on purpose")
    with pytest.raises(TypeError):  # what cannot be pickled
        save_file({"lock": threading.Lock()}, str(tmp_path / "other.pt"))


def test_work_ahead_is_one_step_and_in_order():
    begun, second = [], threading.Event()

    def work(item):
        begun.append(item)
        if item == 2:
            second.set()
        if item == 3:
            raise ValueError("three")
        return item * 10

    ahead = Ahead(work, [1, 2, 3, 4])
    assert ahead(1) == 10 and second.wait(10), "the next one is begun by itself"
    assert 3 not in begun
    assert ahead(2) == 20
    with pytest.raises(ValueError, match="three"):
        ahead(3)


def test_freed_memory_is_given_back():
    """Also what lies below something that is still in use, which the C library keeps by itself."""
    torch.zeros(31 << 20, dtype=torch.uint8)  # from then on, smaller ones come out of its pools
    many = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(300)]
    kept = torch.ones(1 << 20, dtype=torch.uint8)
    del many
    before = _own_memory()
    give_back()
    assert before - _own_memory() > 200 << 20
    assert kept.sum() == 1 << 20


def _own_memory():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 12345.0},
}


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("llama", dict(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})),
        ("qwen3", dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        ("gpt_neox", dict(num_key_value_heads=None, rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": 0.5})),
        ("phi", dict(num_key_value_heads=4, rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": 0.5})),
        ("gemma3_text", dict(num_hidden_layers=6, rope_parameters=BY_TYPE, layer_types=list(BY_TYPE)[::-1] * 3)),
    ],
)
def test_transformers_4_would_read_the_same(kind, changes):
    """Judged by transformers 5, which reads both spellings: alone and together they are one config."""
    family = FAMILIES[kind]
    written = {**family.config(our_args(family, hf_config(kind, **changes)), VOCAB), "dtype": "bfloat16"}
    both = {**written, **older_keys(written)}
    older = {key: value for key, value in both.items() if key not in ("rope_parameters", "dtype")}
    configs = [CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(keys))) for keys in (written, both, older)]
    settings = [family.settings(config) for config in configs]
    assert settings[0] == settings[1] == settings[2]
    assert [config.dtype for config in configs] == [torch.bfloat16] * 3
    if kind == "gemma3_text":
        without = {key: value for key, value in older.items() if key != "layer_types"}
        assert family.settings(CONFIG_MAPPING[kind].from_dict(without)) == settings[0]
        assert written["layer_types"] == ["sliding_attention", "full_attention"] * 3, (
            "a pattern that is not the default"
        )
    changed = family.settings(CONFIG_MAPPING[kind].from_dict({**older, "rope_theta": 77.0, "rotary_emb_base": 77.0}))
    assert changed != settings[2], "the older keys are what was read"
