"""A Hugging Face model folder, read one tensor at a time.

Safetensors files are read by position, not mapped: what is in memory is what was asked for. `.bin` files are mapped.
"""

import json
import os
import re
from functools import cached_property
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from megatron.checkpointing.buffers import Buffers
from megatron.checkpointing.safe_load import load_file
from megatron.convert.families.composite import by_itself, language_model
from megatron.convert.families.config_file import read_config
from megatron.errors import ConversionError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Safetensors' names of what weights can be."""

_OTHER_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_PARTS = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_MOST_BYTES = 1 << 30
"""One system call reads at most 2 GiB."""


class _Entry(NamedTuple):
    """Where a tensor is: [start, end) in the file."""

    path: str
    dtype: torch.dtype
    shape: Tuple[int, ...]
    start: int
    end: int


class HFSource:
    """Config and weights of a folder as `save_pretrained` writes it, of transformers 4 or 5.

    Of a model of several parts it is the language model: `raw_config` and the tensors are as if that were saved by
    itself. other_parts: names of the tensors of the other parts.

    Raises ConversionError if the folder has no readable config or weights, or a file of them is missing or cut short.
    """

    def __init__(self, folder: str):
        if not os.path.isdir(folder):
            raise ConversionError(f"{folder}: no such folder; name one with a config.json and weights")
        self.folder = folder
        whole_config = self._read_config()
        self.raw_config = language_model(whole_config)
        self._entries: Dict[str, _Entry] = {}
        self._tensors: Dict[str, torch.Tensor] = {}
        self.buffers = Buffers()
        names = self._weight_files()
        for name in names:
            self._open(os.path.join(folder, name), name.endswith(".safetensors"))
        kept, self.other_parts = by_itself(whole_config.get("model_type"), self.names())
        self._entries = {kept[name]: entry for name, entry in self._entries.items() if name in kept}
        self._tensors = {kept[name]: tensor for name, tensor in self._tensors.items() if name in kept}

    @cached_property
    def config(self) -> Any:
        """The config object of transformers, with the defaults of its class. Raises ConversionError."""
        try:
            return read_config(self.raw_config)
        except ConversionError as error:
            raise ConversionError(f"{self.folder}: {error}") from None

    def names(self) -> List[str]:
        """The tensors' names, sorted."""
        return sorted({*self._entries, *self._tensors})

    def shape(self, name: str) -> Tuple[int, ...]:
        """Its shape, without reading it."""
        return self._entries[name].shape if name in self._entries else tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype, without reading it."""
        return self._entries[name].dtype if name in self._entries else self._tensors[name].dtype

    def nbytes(self, name: str) -> int:
        """Its size, without reading it."""
        if name in self._entries:
            return self._entries[name].end - self._entries[name].start
        return self._tensors[name].nbytes

    def read(self, name: str) -> torch.Tensor:
        """The tensor. Raises ConversionError if it cannot be read."""
        return self.read_all([name])[0]

    def read_all(self, names: Sequence[str], rows: int = 0) -> List[torch.Tensor]:
        """Several tensors, one after the other in one piece of memory if their dtype is the same.

        There may then be one more, of so many rows and with any contents, behind the others in the same memory.
        """
        dtypes = {self.dtype(name) for name in names}
        if len(dtypes) != 1 or any(name in self._tensors for name in names):
            return [self._tensors[name] if name in self._tensors else self._read(name) for name in names]
        shapes = [self.shape(name) for name in names]
        shapes += [(rows, *shapes[-1][1:])] if rows else []
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = self.buffers.empty((sum(sizes),), dtypes.pop()).split(sizes)
        parts = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for name, part in zip(names, parts, strict=False):
            self._read(name, part)
        return parts

    def _read(self, name: str, tensor: Optional[torch.Tensor] = None) -> torch.Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype) if tensor is None else tensor
        if tensor.numel() == 0:
            return tensor
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        try:
            with open(entry.path, "rb", buffering=0) as file:
                file.seek(entry.start)
                _read_into(file, view)
        except OSError as error:
            raise ConversionError(f"{entry.path}: {name} cannot be read: {error}") from None
        return tensor

    def _read_config(self) -> Dict[str, Any]:
        path = os.path.join(self.folder, "config.json")
        try:
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
        except FileNotFoundError:
            raise ConversionError(f"{self.folder} has no config.json; name a folder made by save_pretrained") from None
        except (ValueError, OSError) as error:
            raise ConversionError(f"{path} is not readable JSON: {error}") from None
        if not isinstance(config, dict):
            raise ConversionError(f"{path} is not the config of a model: it holds a {type(config).__name__}")
        return config

    def _weight_files(self) -> List[str]:
        """As transformers chooses: safetensors first, one file before several."""
        for stem, kind in (("model", "safetensors"), ("pytorch_model", "bin")):
            single = f"{stem}.{kind}"
            if os.path.isfile(os.path.join(self.folder, single)):
                return [single]
            index = os.path.join(self.folder, f"{single}.index.json")
            if os.path.isfile(index):
                return self._shards(index)
        stray = sorted(name for name in os.listdir(self.folder) if _PARTS.fullmatch(name))
        hint = f"; {stray[0]} is there, but not the index of the parts, {stray[0][:5]}….index.json" if stray else ""
        raise ConversionError(
            f"{self.folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor their index{hint}"
        )

    def _shards(self, index: str) -> List[str]:
        try:
            with open(index, encoding="utf-8") as file:
                weight_map = json.load(file)["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ConversionError(f"{index} is not a readable index of weights ({error!r})") from None
        escaping = [name for name in names if os.path.basename(name) != name]
        if escaping:
            raise ConversionError(f"{index} names {escaping[0]!r}, which is not a file beside it")
        missing = [name for name in names if not os.path.isfile(os.path.join(self.folder, name))]
        if missing:
            raise ConversionError(f"{self.folder} is not complete; missing: {', '.join(missing)}")
        return names

    def _open(self, path: str, is_safetensors: bool) -> None:
        if is_safetensors:
            found: Dict[str, Any] = _entries(path)
            self._add(path, found, self._entries)
            return
        state = load_file(path, mmap=True)
        if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
            state = state["state_dict"]
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise ConversionError(f"{path} does not hold the weights of a model: a dictionary of tensors was expected")
        self._add(path, state, self._tensors)

    def _add(self, path: str, found: Dict[str, Any], known: Dict[str, Any]) -> None:
        twice = sorted(set(found) & set(known))
        if twice:
            raise ConversionError(f"{path}: {twice[0]} is in another file too, so which one is meant is unknown")
        known.update(found)


def _entries(path: str) -> Dict[str, _Entry]:
    """The table at the start of a safetensors file: 8 bytes of length, then JSON."""
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise ValueError(f"a table of {length} bytes in a file of {size}")
            table = json.loads(file.read(length))
        table.pop("__metadata__", None)
        entries = {name: _entry(path, item, 8 + length) for name, item in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ConversionError(f"{path} is not a readable safetensors file ({error}); download it again") from None
    end = max((entry.end for entry in entries.values()), default=0)
    if end > size:
        raise ConversionError(f"{path} is cut short: {size} bytes of {end}; download it again")
    return entries


def _entry(path: str, item: Dict[str, Any], offset: int) -> _Entry:
    start, end = item["data_offsets"]
    shape = tuple(item["shape"])
    dtype = DTYPES.get(item["dtype"]) or _OTHER_DTYPES.get(item["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {item['dtype']} is not known")
    if torch.Size(shape).numel() * dtype.itemsize != end - start or start < 0:
        raise ValueError(f"{end - start} bytes for a tensor of shape {list(shape)} in {item['dtype']}")
    return _Entry(path, dtype, shape, offset + start, offset + end)


def _read_into(file: Any, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + _MOST_BYTES])
        if not count:
            raise OSError(f"the file ends after {done} of {len(view)} bytes")
        done += count
