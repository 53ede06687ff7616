"""A `.pt` file whose tensors are written one after the other, so that they are never all in memory.

torch.save pickles first and needs every tensor for it. In the file, a zip archive, the order is free: here the
tensors come first and the pickle, which says what they are, last. torch.load reads it as any other, mapped or not.
"""

import os
import pickle
import sys
from collections import OrderedDict
from io import BytesIO
from typing import Any, Mapping, NamedTuple, Tuple

import torch

from megatron.checkpointing.folders import sync_folder
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
        with _disk_errors(path):
            self._file = open(path, "wb")
        self._writer = torch._C.PyTorchFileWriter(self._file)

    def __enter__(self) -> "StreamedFile":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._file.close()

    def add(self, tensor: torch.Tensor) -> SavedTensor:
        """Write a tensor (on the CPU)."""
        tensor = tensor.detach().contiguous()
        whole = tensor.untyped_storage()
        own = whole if whole.nbytes() == tensor.nbytes else tensor.clone().untyped_storage()
        saved = SavedTensor(str(self._count), tuple(tensor.shape), tensor.dtype)
        with _disk_errors(self._path):
            self._writer.write_record(f"data/{saved.key}", own, own.nbytes())
        self._count += 1
        return saved

    def finish(self, contents: Any) -> None:
        """Write what the file holds. Tensors not added yet are added."""
        buffer = BytesIO()
        _Pickler(buffer, self).dump(contents)
        with _disk_errors(self._path):
            self._writer.write_record("data.pkl", buffer.getvalue(), len(buffer.getvalue()))
            self._writer.write_record("byteorder", sys.byteorder, len(sys.byteorder))
            self._writer.write_end_of_file()
            self._file.flush()


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
        if isinstance(error, (OSError, RuntimeError)):
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"cannot write {self._path} ({reason}); is the disk full?") from error
