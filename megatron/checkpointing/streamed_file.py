"""A `.pt` file whose tensors are written one after the other, so that they are never all in memory.

torch.save pickles first and needs every tensor for it. In the file, a zip archive, the order is free: here the
tensors come first and the pickle, which says what they are, last. torch.load reads it as any other, mapped or not.
"""

import contextlib
import os
import pickle
import sys
from collections import OrderedDict
from io import BytesIO
from typing import Any, Mapping, NamedTuple, Optional, Tuple

import torch

from megatron.checkpointing.folders import sync_folder
from megatron.checkpointing.output_file import OutputFile
from megatron.errors import CheckpointError

_PICKLE_PROTOCOL = 2
"""torch.save's."""


class SavedTensor(NamedTuple):
    """A tensor that is in the file already; stands for it in what is given to `finish`."""

    key: str
    shape: Tuple[int, ...]
    dtype: torch.dtype


class StreamedFile:
    """`with StreamedFile(path) as file: saved = file.add(tensor); file.finish({"name": saved})`.

    All its methods raise CheckpointError if the disk is full or cannot be written. Nothing waits for the disk: call
    `sync_files` when all files of a folder are finished.
    """

    def __init__(self, path: str):
        self._path = path
        self._count = 0
        self._out = _Output(path)
        self._writer = torch._C.PyTorchFileWriter(self._out)
        self._finished = False

    def __enter__(self) -> "StreamedFile":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if not self._finished:
            self._out.give_up()
            self._writer.write_end_of_file()  # torch would do so when the object goes, and abort on any error
        self._out.close()

    def add(self, tensor: torch.Tensor) -> SavedTensor:
        """Write a tensor (on the CPU)."""
        tensor = tensor.detach().contiguous()
        whole = tensor.untyped_storage()
        own = whole if whole.nbytes() == tensor.nbytes else tensor.clone().untyped_storage()
        saved = SavedTensor(str(self._count), tuple(tensor.shape), tensor.dtype)
        self._record(f"data/{saved.key}", own, own.nbytes())
        self._count += 1
        return saved

    def finish(self, contents: Any) -> None:
        """Write what the file holds. Tensors not added yet are added."""
        buffer = BytesIO()
        _Pickler(buffer, self).dump(contents)
        self._record("data.pkl", buffer.getvalue(), len(buffer.getvalue()))
        self._record("byteorder", sys.byteorder, len(sys.byteorder))
        self._finished = True
        self._writer.write_end_of_file()
        self._out.check()

    def _record(self, name: str, contents: Any, size: int) -> None:
        self._writer.write_record(name, contents, size)
        self._out.check()


class _Output:
    """The file as torch's writer sees it: no write fails there, because it may not; `check` raises instead."""

    def __init__(self, path: str):
        self._path = path
        self._error: Optional[OSError] = None
        self._given_up = False
        with _disk_errors(path):
            self._file = OutputFile(path)

    def write(self, contents: Any) -> int:
        """As a file's, until something goes wrong; then nothing is written any more."""
        if self._error is None and not self._given_up:
            try:
                self._file.write(contents)
            except OSError as error:
                self._error = error
        return len(contents)

    def check(self) -> None:
        """Raises CheckpointError if a write failed."""
        with _disk_errors(self._path):
            if self._error is None:
                self._file.flush()
            else:
                raise self._error

    def give_up(self) -> None:
        """Write nothing more."""
        self._given_up = True

    def close(self) -> None:
        """Closing writes what is buffered, which on a full disk fails once more."""
        with contextlib.suppress(OSError):
            self._file.close()


def save_file(contents: Mapping[str, Any], path: str) -> None:
    """A whole file in one call. A tensor that is a part of a larger one is written without the rest of it."""
    with StreamedFile(path) as file:
        file.finish(dict(contents))


def sync_files(folder: str) -> None:
    """Return when every file in a folder, and its list of names, is on the disk. Raises CheckpointError."""
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with _disk_errors(path), open(path, "rb+") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


class _Storage(NamedTuple):
    saved: SavedTensor


class _Pickler(pickle.Pickler):
    """Writes tensors as torch.save does: a call that rebuilds them, with a reference to bytes elsewhere."""

    def __init__(self, buffer: BytesIO, file: StreamedFile):
        super().__init__(buffer, protocol=_PICKLE_PROTOCOL)
        self._streamed = file

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = self._streamed.add(value)
        if not isinstance(value, SavedTensor):
            return NotImplemented
        strides = torch.empty(value.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (_Storage(value), 0, value.shape, strides, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        saved = value.saved
        kind = torch.storage._dtype_to_storage_type_map()[saved.dtype]
        return ("storage", getattr(torch, kind), saved.key, "cpu", torch.Size(saved.shape).numel())


class _disk_errors:
    """A failed write as a CheckpointError that names the file."""

    def __init__(self, path: str):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {self._path} ({error}); is the disk full?") from error
