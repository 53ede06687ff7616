"""tools/ckpts/reshard.py over every way of splitting: exact round trips, and each rank's share stated anew."""

import os

import pytest
import torch
import yaml

from megatron.checkpointing.config_texts import with_setting
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.stamp import read_stamp
from megatron.model.gpt2_model import build_model
from megatron.neox_arguments import NeoXArgs
from tests.golden import cases
from tests.helpers.attention_reference import split_reference
from tests.helpers.resharding import VARIANTS, random_layers, read_all, settings_of, write_checkpoint
from tools.ckpts import reshard


def run(source, out, tp, pp, *more):
    """The tool, in this process; the reader of what it wrote."""
    command = [str(source), str(out), f"--model-parallel-size={tp}", f"--pipe-parallel-size={pp}", *map(str, more)]
    assert reshard.main(command) == 0
    return CheckpointReader(os.path.join(str(out), open(os.path.join(str(out), "latest")).read()))


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("variant", VARIANTS)
def test_1_2_4_1_is_bit_equal(variant, tmp_path):
    settings = settings_of(variant)
    layers = random_layers(NeoXArgs.from_dict(settings))
    half = {i: {n: t.bfloat16() for n, t in state.items()} for i, state in layers.items()} if "rms" in variant else {}
    write_checkpoint(tmp_path / "a", half or layers, settings)
    original = read_all(CheckpointReader(str(tmp_path / "a" / "global_step5")))
    two = run(tmp_path / "a", tmp_path / "b", 2, 0)
    four = run(tmp_path / "b" / "global_step5", tmp_path / "c", 4, 2)
    one = run(tmp_path / "c", tmp_path / "d", 1, 1)
    assert [(r.model_parallel_size, r.pipe_parallel_size) for r in (two, four, one)] == [(2, 0), (4, 2), (1, 1)]
    assert [r.args["padded_vocab_size"] for r in (two, four, one)] == [256, 512, 128]
    assert_equal(read_all(one), original)
    # Another number of stages alone touches no shard.
    assert_equal(read_all(run(tmp_path / "c", tmp_path / "e", 4, 0)), read_all(four))
    assert_equal(read_all(run(tmp_path / "d", tmp_path / "f", 4, 1)), read_all(four))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_is_what_the_model_is_built_by(variant):
    args = NeoXArgs.from_dict(settings_of(variant))
    shards = Shards(args)
    for index, layer in build_model(args).local_layers():
        if not isinstance(layer, torch.nn.Module):
            continue
        buffers = dict(layer.named_buffers())
        for name, tensor in layer.state_dict(keep_vars=True).items():
            rule = shards.split_of(index, name)
            if name in buffers:
                assert rule.dim == (0 if name.endswith("slopes") else None)
                continue
            assert rule.dim == getattr(tensor, "partition_dim", None), name
            if rule.dim is not None:
                whole = [tensor.shape[rule.dim]]
                assert (rule.groups or whole) == (tensor.partition_groups or whole), name
            is_row_bias = name in ("attention.dense.bias", "mlp.linear2.bias")
            assert rule.summed == (is_row_bias and args.gpt_j_residual), name


@pytest.mark.parametrize("variant", ["mha", "mha gpt_j", "gqa gated rms", "gqa rpe", "mha alibi scalenorm"])
def test_each_rank_has_its_heads_and_branches(variant, tmp_path):
    settings = settings_of(variant)
    args = NeoXArgs.from_dict(settings)
    layers = random_layers(args)
    write_checkpoint(tmp_path / "a", layers, settings)
    reader = run(tmp_path / "a", tmp_path / "b", 4, 1)
    geometry, whole = args.head_geometry(), layers[3]
    ranks = [reader.layer_state(3, rank) for rank in range(4)]
    n, m, d = geometry.num_attention_heads, geometry.num_kv_heads, geometry.head_dim

    qkv = [rank["attention.query_key_value.weight"].T for rank in ranks]
    apart = [split_reference(part, n // 4, m // 4, d) for part in qkv]  # q, k, v: [h, d, heads]
    for kind, expected in enumerate(split_reference(whole["attention.query_key_value.weight"].T, n, m, d)):
        assert torch.equal(torch.cat([part[kind] for part in apart], dim=2), expected)

    hidden = torch.randn(5, args.hidden_size, dtype=torch.float64)
    gated = variant == "gqa gated rms"
    branches = [(hidden @ rank["mlp.linear1.weight"].double().T).chunk(2 if gated else 1, -1) for rank in ranks]
    expected = (hidden @ whole["mlp.linear1.weight"].double().T).chunk(2 if gated else 1, -1)
    for branch, values in enumerate(expected):
        assert torch.allclose(torch.cat([part[branch] for part in branches], -1), values)

    context = torch.randn(5, n * d, dtype=torch.float64).chunk(4, -1)
    output = sum(x @ rank["attention.dense.weight"].double().T for x, rank in zip(context, ranks, strict=True))
    assert torch.allclose(output, torch.cat(context, -1) @ whole["attention.dense.weight"].double().T)
    if "attention.dense.bias" in whole:
        copies = [rank["attention.dense.bias"] for rank in ranks]
        acting = sum(copies) if args.gpt_j_residual else copies[3]
        assert torch.equal(acting, whole["attention.dense.bias"])
        assert not args.gpt_j_residual or not any(copy.any() for copy in copies[1:]), "no rounding: all on rank 0"
    if variant == "gqa rpe":
        assert torch.equal(ranks[2]["attention.rpe.weight"], whole["attention.rpe.weight"][:, 6:9])
    if variant == "mha alibi scalenorm":
        assert [rank["attention.alibi_embed.slopes"].item() for rank in ranks] == [2**-2, 2**-4, 2**-6, 2**-8]


def _golden(case, tp, folder):
    """A golden case with its config and the `args` GPT-NeoX records, as a checkpoint folder."""
    settings = yaml.safe_load((cases.DATA / case / "config.yml").read_text())
    target = write_checkpoint(folder, {}, settings, vocab=512, tp=tp)
    cases.write_checkpoint(case, tp, target)
    return settings


@pytest.mark.parametrize("case", cases.TP2)
def test_gpt_neox_checkpoints_at_tp_1_and_2_are_each_other(case, tmp_path):
    for tp in (1, 2):
        _golden(case, tp, tmp_path / f"tp{tp}")
    originals = {tp: CheckpointReader(str(tmp_path / f"tp{tp}" / "global_step5")) for tp in (1, 2)}
    joined = run(tmp_path / "tp2", tmp_path / "joined", 1, 0, "--vocab-size=512")
    apart = run(tmp_path / "tp1", tmp_path / "apart", 2, 1)
    summed = ("attention.dense.bias", "mlp.linear2.bias")  # case1: GPT-NeoX's copies differ and sum to TP 1's
    found, expected = read_all(joined), read_all(originals[1])
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        tolerance = 1e-7 if key[2] in summed else 0.0
        assert (found[key] - tensor).abs().max() <= tolerance, key
    found, expected = read_all(apart), read_all(originals[2])
    for key, tensor in expected.items():
        if key[2] not in summed:
            assert torch.equal(found[key], tensor), key
    for name in summed if case == "case1_pythia_mha" else ():
        total = sum(apart.layer_state(2, rank)[name] for rank in (0, 1))
        assert torch.equal(total, originals[1].layer_state(2)[name])


def test_files_are_those_of_the_new_layout(tmp_path):
    settings = settings_of("gqa gated rms", pipe_parallel_size=0)
    random_states = {"torch_rng_state": torch.get_rng_state(), "lr_scheduler": {"num_iters": 5}}
    layers = random_layers(NeoXArgs.from_dict(settings))
    folder = write_checkpoint(tmp_path / "a", layers, settings, rank_state=random_states)
    run(tmp_path / "a", tmp_path / "b", 2, 2)
    written = tmp_path / "b" / "global_step5"
    names = {path.name for path in written.iterdir()}
    layer_files = {f"layer_{index:02d}-model_{rank:02d}-model_states.pt" for index in layers for rank in (0, 1)}
    rank_files = {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)}
    assert names == layer_files | rank_files | {"configs", "head_geometry.json"}
    state = torch.load(written / "mp_rank_03_model_states.pt", weights_only=True)
    assert state["module"] is None and state["optimizer"] is None and state["iteration"] == 5
    assert state["lr_scheduler"] == {"num_iters": 5} and torch.equal(state["torch_rng_state"], torch.get_rng_state())
    before = torch.load(os.path.join(folder, "mp_rank_00_model_states.pt"), weights_only=True)["args"]
    assert state["args"] == {**before, "model_parallel_size": 2, "padded_vocab_size": 256}
    assert list(state["args"]) == list(before)
    assert read_stamp(str(written))["layers"][1]["geometry"]["head_dim"] == 10
    kept = CheckpointReader(str(written)).config()
    assert (kept["model_parallel_size"], kept["pipe_parallel_size"]) == (2, 2)
    assert {k: v for k, v in kept.items() if "parallel" not in k} == {
        k: v for k, v in CheckpointReader(folder).config().items() if "parallel" not in k
    }
    for path in written.glob("layer_*"):  # no tensor brings along the one it is a part of
        sizes = [tensor.nbytes for tensor in torch.load(path, weights_only=True).values()]
        assert path.stat().st_size <= sum(sizes) + 6000


def test_config_text_keeps_its_comments(tmp_path):
    settings = settings_of("mha")
    folder = write_checkpoint(tmp_path / "a", random_layers(NeoXArgs.from_dict(settings)), settings)
    path = os.path.join(folder, "configs", "tiny.yml")
    text = open(path).read().replace("{", '{ # model-parallel-size: 9\n "model-parallel-size": 1, # one\n', 1)
    open(path, "w").write(text)
    run(tmp_path / "a", tmp_path / "b", 4, 0)
    written = tmp_path / "b" / "global_step5" / "configs"
    new = (written / "tiny.yml").read_text()
    assert new == text.replace('"model-parallel-size": 1, # one', '"model-parallel-size": 4, # one')
    assert yaml.safe_load((written / "layout.yml").read_text()) == {"pipe_parallel_size": 0}
    run(tmp_path / "b", tmp_path / "c", 2, 3)
    assert CheckpointReader(str(tmp_path / "c" / "global_step5")).config()["pipe_parallel_size"] == 3


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"a": "#", "pipe_parallel_size": null}', 3),
        ("pipe-parallel-size: 0 # not pipe-parallel-size: 7\n", 3),
        ("deepspeed_extra_args: {pipe_parallel_size: 5}\npipe_parallel_size: 1\n", 3),
        ("'pipe_parallel_size': 1\nhidden_size: 8\n", 3),
        ("x_pipe_parallel_size: 1\n", None),
        ("# pipe_parallel_size: 1\n", None),
    ],
)
def test_parallel_sizes_in_any_spelling(text, expected):
    new, found = with_setting(text, "pipe_parallel_size", 3)
    before, after = yaml.safe_load(text) or {}, yaml.safe_load(new) or {}
    assert found == (expected is not None)
    assert after.get("pipe_parallel_size", after.get("pipe-parallel-size")) == expected
    others = [key for key in before if key.replace("-", "_") != "pipe_parallel_size"]
    assert list(before) == list(after) and all(before[key] == after[key] for key in others)
