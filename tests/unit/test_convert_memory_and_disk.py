"""What makes conversion fast changes no byte: early writing, memory used again, pages given back, no torch.cat."""

import os
import sys
import threading

import pytest
import torch

from megatron.checkpointing import buffers as buffers_module
from megatron.checkpointing import output_file
from megatron.checkpointing.buffers import Buffers
from megatron.checkpointing.output_file import OutputFile
from megatron.checkpointing.pages import forget_pages
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.safe_load import load_file, save_file
from megatron.checkpointing.streamed_file import save_file as streamed_save
from megatron.convert.exporting import plan_export
from megatron.convert.hf_source import HFSource
from megatron.convert.operations import COPY, VOCABULARY
from megatron.convert.widths import LayerWidths
from tests.helpers.configs import tiny_args
from tests.helpers.convert_folders import assert_same_tensors, run_export, run_import, saved

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's calls")


@pytest.fixture
def ranges(monkeypatch):
    """What the disk is told to write of a file, every 1000 bytes."""
    found = []

    def told(descriptor, start, size, flags):
        found.append((os.fstat(descriptor).st_ino, start, size))
        return 0

    monkeypatch.setattr(output_file, "_STEP", 1000)
    monkeypatch.setattr(output_file, "_sync_file_range", lambda: told)
    return found


def _wait():
    output_file._worker().submit(int).result()


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


@linux
def test_a_file_is_given_to_the_disk_as_it_grows(ranges, tmp_path):
    path, contents, before = tmp_path / "file", os.urandom(300_000), _descriptors()
    file = OutputFile(str(path))
    assert file.write(contents[:999]) == 999 and ranges == []
    sizes = (1, 500, 140_000, 1000, 300_000)
    for size in sizes:
        start = file._written
        assert file.write(memoryview(contents)[start : start + size]) == len(contents[start : start + size])
        _wait()
    file.close()
    assert path.read_bytes() == contents
    inode = os.stat(path).st_ino
    assert ranges == [(inode, 0, 1000), (inode, 1000, 140_500), (inode, 141_500, 1000), (inode, 142_500, 157_500)]
    _wait()
    assert _descriptors() == before


@linux
def test_a_slow_disk_is_told_once_and_not_waited_for(ranges, tmp_path):
    gate, before = threading.Event(), _descriptors()
    output_file._worker().submit(gate.wait)
    try:
        file = OutputFile(str(tmp_path / "file"))
        for _ in range(50):
            file.write(b"x" * 1000)
        assert _descriptors() - before == 2, "the file, and the one range that waits"
        file.close()
    finally:
        gate.set()
    _wait()
    assert [entry[1:] for entry in ranges] == [(0, 1000)]


@linux
def test_a_disk_that_cannot_be_told_loses_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(output_file, "_STEP", 1000)
    before = _descriptors()
    for answer in (lambda *_: -1, lambda *_: 1 / 0):
        monkeypatch.setattr(output_file, "_sync_file_range", lambda answer=answer: answer)
        streamed_save({"a": torch.arange(5000)}, str(tmp_path / "file.pt"))
        _wait()
        assert torch.equal(load_file(str(tmp_path / "file.pt"))["a"], torch.arange(5000))
    assert _descriptors() == before


@linux
def test_forgotten_pages_come_back_from_the_file(tmp_path):
    path = str(tmp_path / "file.pt")
    tensors = {name: torch.arange(start, start + 70_000) for start, name in enumerate("abc")}
    save_file({**tensors, "none": torch.empty(0)}, path)
    mapped = load_file(path, mmap=True)
    for _ in range(2):
        for name, tensor in tensors.items():
            assert torch.equal(mapped[name], tensor)
        assert forget_pages(mapped.values())


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_not_mapped_is_not_forgotten(zipped, tmp_path):
    """Files of torch's oldest format are read into memory, and their only copy is there."""
    source = saved(tmp_path / "hf", num_hidden_layers=2)
    folder = run_import(source, tmp_path / "ours")
    path = os.path.join(folder, "mp_rank_00_model_states.pt")
    state = torch.load(path, weights_only=True)
    save_file(state, path, zipped)
    reader = CheckpointReader(folder)
    before = {name: tensor for index in reader.layer_indices() for name, tensor in reader.layer_state(index).items()}
    reader.release()
    assert len(before) >= 9
    for index in reader.layer_indices():
        for name, tensor in reader.layer_state(index).items():
            assert torch.equal(tensor, state["module"][f"sequential.{index}.{name}"]), name
    run_export(folder, tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")


def test_memory_is_taken_again_when_nothing_refers_to_it(monkeypatch):
    buffers, size = Buffers(), 1 << 20
    first = buffers.empty((size // 4, 2), torch.bfloat16)
    place, part = first.data_ptr(), first.fill_(3)[5:9].view(-1)
    assert first.shape == (size // 4, 2) and first.untyped_storage().nbytes() == size
    del first
    other = buffers.empty((size,), torch.uint8).fill_(1)
    assert other.data_ptr() != place, "a view of the first is in use"
    assert torch.equal(part, torch.full((8,), 3.0, dtype=torch.bfloat16))
    del part
    again = buffers.empty((size // 4,), torch.float32)
    assert again.data_ptr() == place
    monkeypatch.setattr(buffers_module, "_MOST", size)
    del other, again
    assert len(buffers._free) == 2
    larger = buffers.empty((size + 2,), torch.float16)
    assert [memory.ctypes.data for memory in buffers._free] == [place], "the older one is given back"
    assert larger.nbytes == 2 * size + 4
    assert buffers.empty((3, 0), torch.float32).shape == (3, 0)


@linux
def test_layers_take_the_memory_of_those_before_them(tmp_path, monkeypatch):
    """Of a model with many layers, pages arrive for few: two in turns, and each rank's share of them."""
    source = saved(tmp_path / "hf", num_hidden_layers=12, hidden_size=264, intermediate_size=3000)
    taken, original = [], Buffers._take
    monkeypatch.setattr(Buffers, "_take", lambda self, size: taken.append(original(self, size)) or taken[-1])
    monkeypatch.setattr(buffers_module, "_LEAST", 1 << 16)
    folder = run_import(source, tmp_path / "ours", model_parallel_size=2, pipe_parallel_size=1)
    assert len(taken) > 70 and len(set(map(id, taken))) < 0.5 * len(taken)
    run_export(folder, tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")


def test_a_padded_table_is_read_into_its_place(tmp_path):
    source = HFSource(saved(tmp_path / "hf"))
    (name,) = [name for name in source.names() if name.endswith("embed_tokens.weight")]
    rows, width = source.shape(name)
    widths = LayerWidths.of_layer(
        tiny_args(hidden_size=width, num_attention_heads=4, head_dim=6, padded_vocab_size=rows + 5), rows
    )
    assert VOCABULARY.rows_added(widths) == 5 and COPY.rows_added(widths) == 0
    read = source.read_all([name], 5)
    assert [tuple(part.shape) for part in read] == [(rows, width), (5, width)]
    table = VOCABULARY.merge(read, widths)
    assert table.data_ptr() == read[0].data_ptr() and table.shape == (rows + 5, width)
    assert torch.equal(table, VOCABULARY.merge([source.read(name)], widths))
    assert torch.equal(table[:rows], source.read(name)) and torch.equal(table[rows:], table[-1:].expand(5, width))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shapes_are_worked_out_without_joining(ranks, tmp_path, monkeypatch):
    """torch.cat of meta tensors starts torch's compiler, which takes a second; plans need none."""
    original = torch.cat

    def joined(tensors, *rest, **options):
        assert not any(tensor.is_meta for tensor in tensors)
        return original(tensors, *rest, **options)

    monkeypatch.setattr(torch, "cat", joined)
    source = saved(tmp_path / "hf", num_hidden_layers=2)
    folder = run_import(source, tmp_path / "ours", model_parallel_size=ranks)
    assert plan_export(folder).source.problems() == []
