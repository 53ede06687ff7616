"""Import and export as a whole: every layout, every form of file, and what stops them before anything is written."""

import json
import os
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron.checkpointing.folders import find_checkpoint
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.save import ARGS_KEYS
from megatron.checkpointing.stamp import read_stamp
from megatron.convert.hf_source import HFSource
from megatron.convert.hf_writer import HFWriter
from megatron.errors import ConversionError
from megatron.neox_arguments import NeoXArgs
from tests.helpers.convert_folders import assert_same_tensors, change_tensors, raw_config, run_export, run_import, saved
from tests.helpers.convert_models import VOCAB
from tools.ckpts import reshard

LAYOUTS = [(1, 0), (1, 1), (2, 0), (4, 2)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("hf") / "source")


@pytest.mark.parametrize("tp, pp", LAYOUTS)
def test_there_and_back_at_every_layout(source, tp, pp, tmp_path):
    folder = run_import(source, tmp_path / "ours", model_parallel_size=tp, pipe_parallel_size=pp)
    reader = CheckpointReader(folder)
    assert (reader.model_parallel_size, reader.pipe_parallel_size) == (tp, pp)
    assert find_checkpoint(str(tmp_path / "ours")) == folder
    assert sorted(reader.args) == sorted(ARGS_KEYS) and reader.args["padded_vocab_size"] == 128 * tp
    for index in reader.layer_indices():
        reader.verify(0, [index])  # the checksums are right
    assert read_stamp(folder)["layers"][1]["geometry"]["head_dim"] == 10
    rank = reader.layer_state(2, 0)["attention.query_key_value.weight"]
    assert rank.shape == (20 * 10 // tp, 88)
    run_export(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    before, after = HFSource(source).config.to_dict(), HFSource(str(tmp_path / "back")).config.to_dict()
    differing = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    assert differing <= {"_name_or_path", "transformers_version"}
    assert type(raw_config(tmp_path / "back")["head_dim"]) is int


def test_padding_repeats_the_last_row_and_is_cut_off_again(source, tmp_path):
    reader = CheckpointReader(run_import(source, tmp_path / "ours", make_vocab_size_divisible_by=50))
    for index, name in ((0, "word_embeddings.weight"), (6, "final_linear.weight")):
        table = reader.layer_state(index)[name]
        assert table.shape[0] == 150
        assert (table[VOCAB:] == table[VOCAB - 1]).all()


def test_ours_there_and_back_is_equal(source, tmp_path):
    first = CheckpointReader(run_import(source, tmp_path / "a", model_parallel_size=2, iteration=7))
    assert first.iteration == 7
    run_export(tmp_path / "a", tmp_path / "hf")
    second = CheckpointReader(run_import(tmp_path / "hf", tmp_path / "b", model_parallel_size=2, iteration=7))
    assert first.args == second.args
    for rank in range(2):
        for index in first.layer_indices():
            one, other = first.layer_state(index, rank), second.layer_state(index, rank)
            assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_the_yaml_is_ready(source, tmp_path):
    run_import(source, tmp_path / "ours", model_parallel_size=2, pipe_parallel_size=2, precision="bf16")
    args = NeoXArgs.from_ymls([str(tmp_path / "ours" / "model.yml")])
    assert args.head_geometry().head_dim == 10 and args.padded_vocab_size == 256
    assert (args.model_parallel_size, args.pipe_parallel_size, args.precision) == (2, 2, "bfloat16")
    assert args.load == str(tmp_path / "ours") and args.finetune
    text = (tmp_path / "ours" / "model.yml").read_text()
    assert (tmp_path / "ours" / "global_step0" / "configs" / "model.yml").read_text() == text
    keys = list(yaml.safe_load(text))
    assert keys.index("head_dim") < keys.index("rotary_emb_base")
    assert [line.partition(":")[0] for line in text.splitlines() if line and line[0] != "#"] == keys, "a line each"


@pytest.mark.parametrize("form", ["shards", "bin", "bin shards", "zip-less bin"])
def test_every_form_of_file_is_read(source, form, tmp_path):
    folder = tmp_path / "hf"
    os.mkdir(folder)
    tensors = load_file(os.path.join(source, "model.safetensors"))
    names = sorted(tensors)
    with open(folder / "config.json", "w") as file:
        json.dump(raw_config(source), file)
    parts = [names[:9], names[9:]] if "shards" in form else [names]
    ending = "bin" if "bin" in form else "safetensors"
    files = [f"pytorch_model-{n}.{ending}" if len(parts) > 1 else f"pytorch_model.{ending}" for n in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        content = {name: tensors[name] for name in part}
        if ending == "bin":
            torch.save(content, folder / file, _use_new_zipfile_serialization="less" not in form)
        else:
            save_file(content, folder / file)
    if len(parts) > 1:
        index = "pytorch_model.bin.index.json" if ending == "bin" else "model.safetensors.index.json"
        where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / index).write_text(json.dumps({"weight_map": where}))
    run_import(folder, tmp_path / "ours")
    run_export(tmp_path / "ours", tmp_path / "back", max_shard_bytes=60_000)
    assert_same_tensors(source, tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert max(os.path.getsize(tmp_path / "back" / file) for file in index["weight_map"].values()) < 64_000
    for file in set(index["weight_map"].values()):  # the library reads what our writer wrote
        for name, tensor in load_file(tmp_path / "back" / file).items():
            assert index["weight_map"][name] == file and torch.equal(tensor, tensors[name])


def test_each_dtype_stays_or_is_converted(tmp_path):
    folder = saved(tmp_path / "hf", dtype=torch.bfloat16)
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].float()}))
    run_import(folder, tmp_path / "mixed")
    assert yaml.safe_load((tmp_path / "mixed" / "model.yml").read_text())["precision"] == "bfloat16"
    run_export(tmp_path / "mixed", tmp_path / "back")
    assert_same_tensors(folder, tmp_path / "back")
    assert raw_config(tmp_path / "back")["dtype"] == "bfloat16"
    run_export(tmp_path / "mixed", tmp_path / "wide", precision="fp32")
    wide, narrow = HFSource(str(tmp_path / "wide")), HFSource(folder)
    assert all(torch.equal(wide.read(name), narrow.read(name).float()) for name in wide.names())
    assert {wide.dtype(name) for name in wide.names()} == {torch.float32}
    run_import(folder, tmp_path / "half", precision="fp16", pipe_parallel_size=1)
    half = CheckpointReader(str(tmp_path / "half" / "global_step0")).layer_state(2)
    assert {tensor.dtype for tensor in half.values()} == {torch.float16}


def test_harmless_extras_are_left_out_and_told(tmp_path):
    folder = saved(tmp_path / "hf", tie_word_embeddings=True)
    original = load_file(os.path.join(folder, "model.safetensors"))
    extras = {"lm_head.weight": original["model.embed_tokens.weight"].clone()}
    extras.update({f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(5) for i in range(2)})
    change_tensors(folder, lambda tensors: tensors.update(extras))
    told = []
    run_import(folder, tmp_path / "ours", say=told.append)
    assert "put a tokenizer.json into" in told.pop()
    assert len(told) == 2 and "2 buffers" in told[0] and "lm_head.weight is left out: it equals" in told[1]
    run_export(tmp_path / "ours", tmp_path / "back")
    assert set(HFSource(str(tmp_path / "back")).names()) == set(original)


def test_export_of_a_resharded_checkpoint_with_older_names(source, tmp_path):
    run_import(source, tmp_path / "a", model_parallel_size=1)
    for tp, pp in ((4, 1), (2, 0)):
        out = tmp_path / f"b{tp}"
        layout = [f"--model-parallel-size={tp}", f"--pipe-parallel-size={pp}"]
        assert reshard.main([str(tmp_path / "a"), str(out), *layout]) == 0
    for rank in range(4):  # as GPT-NeoX named a gated MLP once
        path = tmp_path / "b4" / "global_step0" / f"layer_02-model_{rank:02d}-model_states.pt"
        state = torch.load(path)
        up, gate = state.pop("mlp.linear1.weight").chunk(2)
        state.update({"mlp.w3.weight": up.clone(), "mlp.w1.weight": gate.clone()})
        state["mlp.w2.weight"] = state.pop("mlp.linear2.weight")
        torch.save(state, path)
    for tp in (4, 2):
        run_export(tmp_path / f"b{tp}", tmp_path / f"back{tp}", vocab_size=VOCAB, architecture="MistralForCausalLM")
        assert_same_tensors(source, tmp_path / f"back{tp}")


def test_without_a_tokenizer_or_a_size_every_row_is_kept_and_told(source, tmp_path):
    run_import(source, tmp_path / "ours")
    folder = tmp_path / "moved"
    os.rename(tmp_path / "ours" / "global_step0", folder)
    shutil.rmtree(tmp_path / "ours")
    told = []
    run_export(folder, tmp_path / "back", say=told.append, architecture="mistral")
    assert "all 128 rows are kept" in told[0]
    assert raw_config(tmp_path / "back")["vocab_size"] == 128
    with pytest.raises(ConversionError, match="vocab-size=129: .* only 128 rows"):
        run_export(folder, tmp_path / "other", vocab_size=129)


def test_writer_keeps_to_its_plan(tmp_path):
    plan = [("a", (2, 3), torch.float32), ("b", (), torch.bfloat16), ("c", (0, 4), torch.float16)]
    with HFWriter(str(tmp_path), plan) as writer:
        with pytest.raises(ConversionError, match="b .* came, where"):
            writer.write("b", torch.tensor(1.0).bfloat16())
        with pytest.raises(ConversionError, match="came, where"):
            writer.write("a", torch.zeros(2, 3).half())
        writer.write("a", torch.arange(6.0).view(3, 2).T)
        writer.write("b", torch.tensor(1.5).bfloat16())
        writer.write("c", torch.zeros(0, 4).half())
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["a"], torch.arange(6.0).view(3, 2).T) and found["b"].item() == 1.5
    assert found["c"].shape == (0, 4)
    with pytest.raises(ConversionError, match="b was announced and not written"):
        with HFWriter(str(tmp_path), plan) as writer:
            writer.write("a", torch.zeros(2, 3))
