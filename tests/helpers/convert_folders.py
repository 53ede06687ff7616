"""Folders of tiny models for tests of conversion: written, converted both ways, changed and compared."""

import json
import os

import torch
from safetensors.torch import load_file, save_file

from megatron.convert.exporting import export_hf
from megatron.convert.hf_source import HFSource
from megatron.convert.importing import import_hf
from tests.helpers.convert_models import hf_config, hf_model

GQA = dict(hidden_size=88, num_attention_heads=12, num_key_value_heads=4, head_dim=10, intermediate_size=44)
"""No quotient: 88 % 12 != 0; splits over 4 ranks."""


def saved(folder, kind="mistral", dtype=torch.float32, shard="5GB", **changes):
    """A tiny model of transformers', on disk."""
    hf_model(hf_config(kind, **{**GQA, **changes})).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return str(folder)


def run_import(source, out, **options):
    return import_hf(str(source), str(out), progress=False, **options)


def run_export(checkpoint, out, **options):
    return export_hf(str(checkpoint), str(out), progress=False, **options)


def assert_same_tensors(one, other):
    first, second = HFSource(str(one)), HFSource(str(other))
    assert first.names() == second.names()
    for name in first.names():
        assert first.dtype(name) == second.dtype(name), name
        assert torch.equal(first.read(name), second.read(name)), name


def raw_config(folder):
    with open(os.path.join(folder, "config.json")) as file:
        return json.load(file)


def change_config(folder, **changes):
    changed = {key: value for key, value in {**raw_config(folder), **changes}.items() if value is not ...}
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(changed, file)


def change_tensors(folder, change):
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
