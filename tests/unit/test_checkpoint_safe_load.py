"""Files are data: nothing in one is run, and damage is reported as damage."""

import io
import os
import pickle
import random

import numpy as np
import pytest
import torch

from megatron.checkpointing.safe_load import load_file, save_file, verify_file
from megatron.errors import CheckpointError


class Runs:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class RunsOnBuild:
    def __reduce__(self):
        return eval, ("open('/dev/null')",)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_would_run_code_is_refused_and_nothing_runs(tmp_path, zipped, mmap):
    path, trace = str(tmp_path / "bad.pt"), str(tmp_path / "trace")
    save_file({"module": {"weight": torch.ones(2)}, "extra": Runs(trace)}, path, zipped)
    with pytest.raises(CheckpointError, match="refused"):
        load_file(path, mmap=mmap)
    assert not os.path.exists(trace)
    torch.load(path, weights_only=False)
    assert os.path.exists(trace), "the file does run code when it is read without care"


def test_builtins_are_refused(tmp_path):
    save_file({"extra": RunsOnBuild()}, str(tmp_path / "bad.pt"))
    with pytest.raises(CheckpointError, match="eval"):
        load_file(str(tmp_path / "bad.pt"))


def test_a_bare_pickle_is_refused(tmp_path):
    path, trace = tmp_path / "bad.pt", str(tmp_path / "trace")
    path.write_bytes(pickle.dumps(Runs(trace)))
    with pytest.raises(CheckpointError):
        load_file(str(path))
    assert not os.path.exists(trace)


@pytest.mark.parametrize("core", ["core", "_core"])
def test_random_states_are_read_under_both_names_of_numpy(tmp_path, core):
    """numpy 2 renamed numpy.core to numpy._core; files name the one they were written with."""
    path = tmp_path / "states.pt"
    states = {"np_rng_state": np.random.get_state(), "random_rng_state": random.getstate()}
    save_file(states, str(path), zipped=False)
    written = "_core" if b"numpy._core.multiarray" in path.read_bytes() else "core"
    names = (f"numpy.{each}.multiarray".encode() for each in (written, core))
    path.write_bytes(path.read_bytes().replace(*names))
    loaded = load_file(str(path))
    assert np.array_equal(loaded["np_rng_state"][1], states["np_rng_state"][1])
    assert loaded["random_rng_state"] == states["random_rng_state"]


class Opens:
    """Unpickling this truncates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return io.FileIO, (self.path, "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_bytes_of_transformer_engine_stay_bytes(tmp_path, zipped):
    """GPT-NeoX's `_extra_state`. What is packed in them is not unpickled with the file, and io opens nothing."""
    path, trace = str(tmp_path / "state.pt"), str(tmp_path / "trace")
    packed = io.BytesIO(pickle.dumps(Runs(trace)))
    save_file({"attention.qkv._extra_state": packed, "weight": torch.ones(2)}, path, zipped)
    loaded = load_file(path, mmap=True)["attention.qkv._extra_state"]
    assert type(loaded) is io.BytesIO and loaded.getvalue() == packed.getvalue()
    assert not os.path.exists(trace)
    save_file({"attention.qkv._extra_state": Opens(trace)}, path, zipped)
    with pytest.raises(CheckpointError, match="_io.FileIO would have to be called"):
        load_file(path)
    assert not os.path.exists(trace)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("mmap", [True, False])
def test_truncated_file(tmp_path, zipped, kept, mmap):
    path = tmp_path / "cut.pt"
    save_file({"weight": torch.arange(1000.0), "n": 3}, str(path), zipped)
    contents = path.read_bytes()
    path.write_bytes(contents[: int(len(contents) * kept)])
    with pytest.raises(CheckpointError, match="damaged or not complete"):
        load_file(str(path), mmap=mmap)


def test_one_changed_byte(tmp_path):
    """torch.load does not notice it."""
    path = tmp_path / "rot.pt"
    save_file({"weight": torch.arange(1000.0)}, str(path))
    verify_file(str(path))
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    assert not torch.equal(load_file(str(path))["weight"], torch.arange(1000.0))
    with pytest.raises(CheckpointError, match="checksum"):
        verify_file(str(path))


def test_text_and_missing_files(tmp_path):
    (tmp_path / "text.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="damaged or not complete"):
        load_file(str(tmp_path / "text.pt"))
    with pytest.raises(CheckpointError, match="does not exist"):
        load_file(str(tmp_path / "none.pt"))


def test_write_failure_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="cannot write .*missing/a.pt"):
        save_file({}, str(tmp_path / "missing" / "a.pt"))
