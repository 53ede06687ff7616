"""Safetensors files written one tensor at a time, in an order laid out beforehand.

The library's own writer wants all tensors of a file at once. The format is simple: 8 bytes of length (little endian),
a JSON table of names, dtypes, shapes and offsets, and the tensors' bytes one after the other.
"""

import json
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from megatron.checkpointing.output_file import OutputFile
from megatron.convert.hf_source import DTYPES
from megatron.errors import ConversionError

MAX_SHARD_BYTES = 5 * 10**9
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Item = Tuple[str, Tuple[int, ...], torch.dtype]


class HFWriter:
    """`with HFWriter(folder, tensors) as writer: writer.write(name, tensor)`, in the order of `tensors`.

    tensors: (name, shape, dtype) of all that will come. A file is at most max_shard_bytes, unless one tensor alone is
    larger. Several files get an index. On leaving, every file is on the disk. The folder should have a temporary name:
    nothing is renamed or removed here.

    Raises ConversionError if a tensor comes out of turn or with another shape or dtype, or if one is missing at the
    end; OSError if the disk is full.
    """

    def __init__(self, folder: str, tensors: Sequence[Item], max_shard_bytes: int = MAX_SHARD_BYTES):
        self._folder = folder
        self._shards = _shards(tensors, max_shard_bytes)
        count = len(self._shards)
        self._names = [
            SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            for number in range(1, count + 1)
        ]
        self._todo = [(number, item) for number, shard in enumerate(self._shards) for item in shard]
        self._next = 0
        self._file: Optional[OutputFile] = None
        self._open_shard = -1

    def __enter__(self) -> "HFWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is not None:
            if self._file is not None:
                self._file.close()
            return
        if self._next < len(self._todo):
            raise ConversionError(f"{self._todo[self._next][1][0]} was announced and not written")
        self._close()
        for name in self._names:
            sync_file(os.path.join(self._folder, name))
        if len(self._shards) > 1:
            self._write_index()

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Append the next tensor; returns its bytes."""
        shard, wanted = self._todo[self._next] if self._next < len(self._todo) else (0, None)
        if (name, tuple(tensor.shape), tensor.dtype) != wanted:
            raise ConversionError(f"{name} {list(tensor.shape)} {tensor.dtype} came, where {wanted} was due")
        while self._open_shard < shard:
            self._start_next()
        if tensor.numel():
            self._file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        self._next += 1
        return tensor.nbytes

    def _start_next(self) -> None:
        self._close()
        self._open_shard += 1
        self._file = OutputFile(os.path.join(self._folder, self._names[self._open_shard]))
        self._file.write(_header(self._shards[self._open_shard]))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_index(self) -> None:
        weight_map = {item[0]: self._names[number] for number, item in self._todo}
        index = {
            "metadata": {"total_size": sum(_nbytes(item) for _, item in self._todo)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(os.path.join(self._folder, INDEX_FILE), index)


def write_json(path: str, contents: Any) -> None:
    """JSON as transformers writes it; returns when it is on the disk."""
    write_text(path, json.dumps(contents, indent=2, ensure_ascii=False) + "\n")


def write_text(path: str, text: str) -> None:
    """Returns when it is on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: str) -> None:
    """Put a finished file on the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _shards(tensors: Sequence[Item], most: int) -> List[List[Item]]:
    shards: List[List[Item]] = [[]]
    filled = 0
    for item in tensors:
        size = _nbytes(item)
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += size
    return shards


def _header(items: Sequence[Item]) -> bytes:
    table: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in items:
        name, shape, dtype = item
        end = offset + _nbytes(item)
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _nbytes(item: Item) -> int:
    return torch.Size(item[1]).numel() * item[2].itemsize
