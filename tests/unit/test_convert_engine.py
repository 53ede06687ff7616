"""Import and export as a whole: every layout, every form of file, and what stops them before anything is written."""

import importlib
import json
import multiprocessing
import os
import resource
import signal
from functools import partial

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron.checkpointing.folders import find_checkpoint
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.save import ARGS_KEYS
from megatron.checkpointing.stamp import read_stamp
from megatron.convert.exporting import export_hf
from megatron.convert.hf_source import HFSource
from megatron.convert.hf_writer import HFWriter
from megatron.convert.importing import import_hf
from megatron.errors import CheckpointError, ConfigError, ConversionError
from megatron.neox_arguments import NeoXArgs
from tests.helpers.convert_models import VOCAB, hf_config, hf_model
from tools.ckpts import reshard

GQA = dict(hidden_size=88, num_attention_heads=12, num_key_value_heads=4, head_dim=10, intermediate_size=44)
"""No quotient: 88 % 12 != 0; splits over 4 ranks."""
LAYOUTS = [(1, 0), (1, 1), (2, 0), (4, 2)]


def saved(folder, kind="mistral", dtype=torch.float32, shard="5GB", **changes):
    """A tiny model of transformers', on disk."""
    hf_model(hf_config(kind, **{**GQA, **changes})).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return str(folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("hf") / "source")


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


def test_fp16_that_would_be_infinite_is_refused(tmp_path):
    folder = saved(tmp_path / "hf", dtype=torch.bfloat16)
    change_tensors(folder, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].fill_(1e5))
    with pytest.raises(ConversionError, match="mlp.linear2.weight: fp16 holds no numbers above 65504"):
        run_import(folder, tmp_path / "ours", precision="fp16")
    assert sorted(os.listdir(tmp_path)) == ["hf"]


def test_harmless_extras_are_left_out_and_told(tmp_path):
    folder = saved(tmp_path / "hf", tie_word_embeddings=True)
    original = load_file(os.path.join(folder, "model.safetensors"))
    extras = {"lm_head.weight": original["model.embed_tokens.weight"].clone()}
    extras.update({f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(5) for i in range(2)})
    change_tensors(folder, lambda tensors: tensors.update(extras))
    told = []
    run_import(folder, tmp_path / "ours", say=told.append)
    assert len(told) == 2 and "2 buffers" in told[0] and "lm_head.weight is left out: it equals" in told[1]
    run_export(tmp_path / "ours", tmp_path / "back")
    assert set(HFSource(str(tmp_path / "back")).names()) == set(original)


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
        (dict(model_type="falcon_mamba"), "model_type=falcon_mamba is not known here; known: llama"),
        (dict(model_type=...), "model_type=None"),
        (dict(quantization_config={"quant_method": "gptq", "bits": 4}), r"quantized \(gptq\)"),
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
    told = []
    run_export(folder, tmp_path / "back", say=told.append, architecture="mistral")
    assert "all 128 rows are kept" in told[0]
    assert raw_config(tmp_path / "back")["vocab_size"] == 128
    with pytest.raises(ConversionError, match="vocab-size=129: .* only 128 rows"):
        run_export(folder, tmp_path / "other", vocab_size=129)


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
