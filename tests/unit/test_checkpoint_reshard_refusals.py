"""What cannot be joined or split is refused with the reason, and nothing is left behind."""

import os

import pytest
import torch

from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.vocabulary import resize_vocabulary, rows_at, unpadded_rows
from megatron.errors import CheckpointError
from megatron.neox_arguments import NeoXArgs
from tests.helpers.resharding import random_layers, read_all, settings_of, write_checkpoint
from tools.ckpts import reshard


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A TP 1 checkpoint; not to be changed."""
    folder = tmp_path_factory.mktemp("source")
    settings = settings_of("gqa gated rms")
    write_checkpoint(folder, random_layers(NeoXArgs.from_dict(settings)), settings)
    return str(folder)


def refusal(capsys, source, out, tp, *more):
    """The tool's message; it must have left the folder as it was."""
    before = sorted(os.listdir(out)) if os.path.isdir(out) else None
    command = [str(source), str(out), f"--model-parallel-size={tp}", "--pipe-parallel-size=1", *map(str, more)]
    assert reshard.main(command) == 1
    assert (sorted(os.listdir(out)) if os.path.isdir(out) else None) == before
    return capsys.readouterr().err


def test_nothing_is_overwritten(source, tmp_path, capsys):
    assert "exists and is not empty" in refusal(capsys, source, source, 2)
    (tmp_path / "mine").write_text("x")
    assert "exists and is not empty" in refusal(capsys, source, tmp_path, 2)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / ".saving_global_step5").mkdir()  # of a run that was killed
    arguments = [source, str(empty), "--model-parallel-size=2", "--pipe-parallel-size=0"]
    assert reshard.main(arguments) == 0
    assert sorted(os.listdir(empty)) == ["global_step5", "latest"]


def test_sizes_that_do_not_divide(source, tmp_path, capsys):
    message = refusal(capsys, source, tmp_path / "out", 8)
    assert "num_attention_heads=12 does not divide by model_parallel_size=8" in message
    assert "the MLP width 44 does not divide by model_parallel_size=8" in message
    message = refusal(capsys, source, tmp_path / "out", 6)
    assert "num_kv_heads=4 does not divide by model_parallel_size=6" in message and "attention_heads" not in message


def test_sources_that_are_none(tmp_path, capsys, source):
    assert "no such folder" in refusal(capsys, tmp_path / "nowhere", tmp_path / "out", 2)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no checkpoint" in refusal(capsys, empty, tmp_path / "out", 2)
    assert "iteration=7" in refusal(capsys, source, tmp_path / "out", 2, "--iteration=7")


def test_a_failure_half_way_leaves_nothing(source, tmp_path, capsys, monkeypatch):
    from megatron.checkpointing import reshard as writer

    def full_disk(contents, path):
        if "layer_03" in path:
            raise CheckpointError("cannot write")
        torch.save(contents, path)

    monkeypatch.setattr(writer, "save_file", full_disk)
    assert "cannot write" in refusal(capsys, source, tmp_path / "out", 2)


def test_damaged_files_are_not_passed_on(source, tmp_path, capsys):
    for form in (0, 1):
        arguments = [source, str(tmp_path / f"copy{form}"), "--model-parallel-size=2", f"--pipe-parallel-size={form}"]
        assert reshard.main(arguments) == 0
        reader = CheckpointReader(str(tmp_path / f"copy{form}" / "global_step5"))
        needle = reader.layer_state(3, 1)["mlp.linear2.weight"].numpy().tobytes()[:16]
        del reader
        name = "layer_03-model_01-model_states.pt" if form else "mp_rank_01_model_states.pt"
        path = tmp_path / f"copy{form}" / "global_step5" / name
        path.write_bytes(path.read_bytes().replace(needle, bytes(16)))
        message = refusal(capsys, tmp_path / f"copy{form}", tmp_path / "out", 1)
        assert name in message and "does not have its checksum" in message


def _two_ranks(source, folder, change):
    """The source at TP 2, with `change` made to rank 1's first layer."""
    assert reshard.main([source, str(folder), "--model-parallel-size=2", "--pipe-parallel-size=1"]) == 0
    path = folder / "global_step5" / "layer_02-model_01-model_states.pt"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def test_replicas_that_differ(source, tmp_path, capsys):
    def drift(state):
        state["input_layernorm.scale"][3] += 0.25
        state["mlp.linear2.bias"][0] -= 0.5

    _two_ranks(source, tmp_path / "two", drift)
    message = refusal(capsys, tmp_path / "two", tmp_path / "one", 1)
    assert "layer 2" in message and "differ by up to" in message and "--average-replicas" in message
    arguments = [str(tmp_path / "two"), str(tmp_path / "one"), "--model-parallel-size=1", "--pipe-parallel-size=1"]
    assert reshard.main([*arguments, "--average-replicas"]) == 0
    original = read_all(CheckpointReader(os.path.join(source, "global_step5")))
    found = read_all(CheckpointReader(str(tmp_path / "one" / "global_step5")))
    for key, tensor in original.items():
        expected = tensor.clone()
        if key[1:] == (2, "input_layernorm.scale"):
            expected[3] += 0.125
        if key[1:] == (2, "mlp.linear2.bias"):
            expected[0] -= 0.25
        assert torch.allclose(found[key], expected, atol=1e-7), key


def test_names_without_a_rule_and_other_widths(source, tmp_path, capsys):
    _two_ranks(source, tmp_path / "a", lambda state: state.update({"attention.projection.weight": torch.ones(2)}))
    assert "layer 2 has other names on one rank" in refusal(capsys, tmp_path / "a", tmp_path / "out", 1)
    args = NeoXArgs.from_dict(settings_of("gqa gated rms"))
    with pytest.raises(CheckpointError, match="layer 2 attention.projection.weight: not a parameter"):
        Shards(args).join(2, "attention.projection.weight", [torch.ones(2), torch.ones(2)])
    with pytest.raises(CheckpointError, match="72 rows over all ranks in the checkpoint, 88 by the config"):
        Shards(args).join(2, "mlp.linear1.weight", [torch.ones(36, 88)] * 2)
    with pytest.raises(CheckpointError, match="does not split over model_parallel_size=7"):
        Shards(args).piece(2, "attention.dense.weight", torch.ones(88, 120), 0, 7)


def test_geometry_must_be_the_checkpoints(source, tmp_path, capsys):
    other = tmp_path / "other.yml"
    text = open(os.path.join(source, "global_step5", "configs", "tiny.yml")).read()
    other.write_text(text.replace('"num_kv_heads": 4', '"num_kv_heads": 6'))
    stamped = tmp_path / "stamped"
    assert reshard.main([source, str(stamped), "--model-parallel-size=2", "--pipe-parallel-size=1"]) == 0
    message = refusal(capsys, stamped, tmp_path / "out", 1, "--config", other)
    assert "num_kv_heads: 4 in the checkpoint, 6 in the config" in message


def test_vocabulary_rows():
    table = torch.randn(512, 3)
    copies = torch.cat([table[:200], table[199:200].expand(312, -1)])
    assert (unpadded_rows(table), unpadded_rows(copies)) == (512, 200)
    # known: GPT-NeoX's rule
    assert rows_at([table], 128, 4, 1, vocab_size=100) == 128
    assert rows_at([table], 128, 2, 4, vocab_size=300) == 512
    # unknown, and any vocabulary that gives the old size gives one new size
    assert rows_at([torch.randn(384, 3)], 128, 1, 2, None) == 512
    assert rows_at([torch.randn(512, 3)], 128, 2, 4, None) == 512
    # unknown, and only repetitions would go
    assert rows_at([copies], 128, 4, 1, None) == 256
    with pytest.raises(CheckpointError, match="has 384 to 512.*--vocab-size"):
        rows_at([table], 128, 2, 1, None)
    with pytest.raises(CheckpointError, match="600 tokens is larger"):
        rows_at([table], 128, 2, 1, 600)


def test_vocabulary_is_cut_only_where_it_is_padding():
    table = torch.randn(256, 3)
    longer = resize_vocabulary(table, 384, None, "x")
    assert torch.equal(longer[:256], table) and torch.equal(longer[256:], table[255:].expand(128, -1))
    assert torch.equal(resize_vocabulary(longer, 256, None, "x"), table)
    assert torch.equal(resize_vocabulary(table, 128, 100, "x"), table[:128])
    with pytest.raises(CheckpointError, match="256 rows cannot be cut to 128, because the tokenizer is not known"):
        resize_vocabulary(table, 128, None, "x")
    with pytest.raises(CheckpointError, match="because the vocabulary has 129 tokens"):
        resize_vocabulary(table, 128, 129, "x")


def test_padding_tokens_never_win():
    """Greedy generation picks no token that the original did not have, even where all logits are below zero."""
    table = torch.randn(128, 8)
    table[:, 0] += 10
    hidden = torch.randn(50, 8)
    hidden[:, 0] = -5
    logits = hidden @ resize_vocabulary(table, 512, None, "x").T
    assert (logits[:, :128].max(1).values < 0).all()
    assert (logits.argmax(1) < 128).all()
