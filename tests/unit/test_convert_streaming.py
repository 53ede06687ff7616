"""An export reads what it writes next and nothing else: checksums layer by layer, few pages, one tensor at a time."""

import os
import weakref
from pathlib import Path

import pytest
import torch

from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.safe_load import Checksums, load_file, save_file
from megatron.checkpointing.zero3 import PartitionedWeights
from megatron.convert import neox_source
from megatron.convert.exporting import plan_export, write_export
from megatron.errors import CheckpointError
from tests.helpers.convert_folders import assert_same_tensors, run_export, run_import, saved
from tests.helpers.partitioned import as_partitioned


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("hf") / "source", num_hidden_layers=3)


def _damage(path, tensor):
    """Change one bit of a tensor in a file."""
    needle = tensor.contiguous().numpy().tobytes()
    contents = bytearray(Path(path).read_bytes())
    assert contents.count(needle) == 1
    contents[contents.index(needle) + len(needle) // 2] ^= 1
    Path(path).write_bytes(contents)


def test_checksums_of_single_tensors(tmp_path):
    path = str(tmp_path / "file.pt")
    long = torch.arange(3000.0)
    contents = {"a": -torch.arange(1.0, 1000.0), "part": long[5:9], "whole": long, "none": torch.empty(0)}
    for zipped in (True, False):
        save_file(contents, path, zipped)
        loaded = load_file(path, mmap=True)
        for name, tensor in loaded.items():
            Checksums(path).check(name, tensor)
    save_file(contents, path)
    _damage(path, contents["a"])
    loaded, checksums = load_file(path, mmap=True), Checksums(path)
    assert not torch.equal(loaded["a"], contents["a"])
    with pytest.raises(CheckpointError, match="a does not have its checksum"):
        checksums.check("a", loaded["a"])
    checksums.check("part", loaded["part"])  # the rest of the file is as it was
    damaged = bytearray(Path(path).read_bytes())
    damaged[damaged.index(b"whole")] ^= 1  # in the pickle, where tensors have their names
    Path(path).write_bytes(damaged)
    with pytest.raises(CheckpointError, match="damaged"):
        Checksums(path)


def test_sequential_files_are_checked_layer_by_layer(source, tmp_path):
    folder = run_import(source, tmp_path / "ours", model_parallel_size=2)
    reader = CheckpointReader(folder)
    path = os.path.join(folder, "mp_rank_01_model_states.pt")
    _damage(path, reader.tensor(4, "mlp.linear2.weight", 1).clone())
    damaged = CheckpointReader(folder)
    for index in damaged.layer_indices():
        if index != 4:
            damaged.verify_layer(index)
    with pytest.raises(CheckpointError, match="mp_rank_01.*sequential.4.mlp.linear2.weight does not have its checksum"):
        damaged.verify_layer(4)
    with pytest.raises(CheckpointError, match="sequential.4.mlp.linear2.weight"):
        run_export(folder, tmp_path / "back")
    assert os.listdir(tmp_path) == ["ours"]


@pytest.mark.parametrize("layout", [(2, 0), (1, 0), (1, 2)])
def test_file_pages_are_given_back_between_layers(layout, tmp_path, monkeypatch):
    """Few pages of files that many layers are in are in memory, and in the end none that a tensor is in."""
    source = saved(tmp_path / "hf", num_hidden_layers=8, intermediate_size=3000)
    tp, pp = layout
    folder = run_import(source, tmp_path / "ours", model_parallel_size=tp, pipe_parallel_size=pp)
    monkeypatch.setattr(neox_source, "_MOST_MAPPED", 0)
    plan = plan_export(folder)
    release, mapped = plan.source.release, []

    def counted():
        release()
        mapped.append(_mapped_bytes(folder))

    monkeypatch.setattr(plan.source, "release", counted)
    write_export(plan, str(tmp_path / "back"), progress=False)
    assert_same_tensors(source, tmp_path / "back")
    assert len(mapped) == 11  # the embedding, 8 layers, the final norm, the output layer
    size = sum(path.stat().st_size for path in Path(folder).glob("*.pt"))
    assert max(mapped) < 0.45 * size, "of the layer just read, and of the next one, twice: checked and read"
    assert mapped[-1] <= tp * 2**16 < 0.02 * size, "the system maps pages around those that are asked for"


def _mapped_bytes(folder):
    """Of files in a folder, in memory now."""
    total, ours = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if not first.endswith(":"):
                ours = any(word.startswith(folder) for word in rest)
            elif ours and first == "Rss:":
                total += int(rest[0]) << 10
    return total


@pytest.mark.parametrize("tied", [False, True])
def test_zero_3_joins_one_tensor_at_a_time(tied, tmp_path, monkeypatch):
    """However many there are, one is in memory, each is read once, and they are what was saved."""
    source = saved(tmp_path / "hf", num_hidden_layers=5, tie_word_embeddings=tied)
    whole = run_import(source, tmp_path / "whole")
    pieces = as_partitioned(whole, tmp_path / "pieces", ranks=3)
    watch = _Watch(monkeypatch)
    plan = plan_export(pieces)
    assert watch.read == [], "a plan needs shapes only"
    write_export(plan, str(tmp_path / "back"), progress=False)
    assert_same_tensors(source, tmp_path / "back")
    saved_names = list(torch.load(os.path.join(whole, "mp_rank_00_model_states.pt"))["module"])
    assert sorted(watch.read) == sorted(saved_names)
    assert watch.most == watch.largest > 0
    assert watch.total > 10 * watch.largest, "the model is larger than what is held"


class _Watch:
    """Puts every tensor that is joined into memory of its own, and follows how long that is kept."""

    def __init__(self, monkeypatch):
        self.read, self.live, self.most, self.largest, self.total = [], 0, 0, 0, 0
        original = PartitionedWeights.__getitem__

        def watched(weights, name):
            array = original(weights, name).numpy().copy()
            self.read.append(name)
            self.live += array.nbytes
            self.total += array.nbytes
            self.most, self.largest = max(self.most, self.live), max(self.largest, array.nbytes)
            weakref.finalize(array, self._freed, array.nbytes)
            return torch.from_numpy(array)

        monkeypatch.setattr(PartitionedWeights, "__getitem__", watched)

    def _freed(self, size):
        self.live -= size


def test_zero_3_with_shared_parameters_and_files_that_do_not_fit(source, tmp_path):
    whole = run_import(source, tmp_path / "whole")
    state = torch.load(os.path.join(whole, "mp_rank_00_model_states.pt"))["module"]
    other, name = "sequential.4.input_layernorm.scale", "sequential.2.input_layernorm.scale"
    folder = as_partitioned(whole, tmp_path / "pieces", 2, tied={other: name})
    weights = PartitionedWeights(folder, 0)
    assert sorted(weights) == sorted(state) and len(weights) == len(state)
    for each in weights:
        expected = state[name if each == other else each]
        assert weights.on_meta(each).shape == expected.shape and weights.on_meta(each).is_meta
        assert torch.equal(weights[each], expected), each
    path = Path(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    optimizer = torch.load(path)
    groups = optimizer["optimizer_state_dict"]["fp32_flat_groups"]
    groups[-1] = groups[-1][:-1].clone()
    torch.save(optimizer, path)
    with pytest.raises(CheckpointError, match="the optimizer files end within sequential.7.final_linear.weight"):
        PartitionedWeights(folder, 0)
