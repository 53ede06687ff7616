"""Reading and writing `.pt` files without ever running code that a file brings along.

DeepSpeed reads with `weights_only=False`, which lets a pickle call any function. `use_safe_files` replaces the object
through which its engines (and PipelineModule) read and write.
"""

import importlib
import io
import os
import pickle
import zipfile
import zlib
from functools import cache
from typing import Any, List, Optional, Set, Tuple

import numpy as np
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from megatron.checkpointing.legacy import current_file, is_unused_buffer
from megatron.errors import CheckpointError

_DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Plain records in the optimizer state; building one does nothing. Which exist depends on the version."""

_READ_ERRORS = (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError, TypeError)
"""What torch.load raises on bytes that are not a checkpoint."""


def load_file(path: str, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """The contents of a `.pt` file; only tensors, plain Python values and a few named records are accepted.

    mmap leaves the tensors on disk until they are used (where the file format allows it).
    Raises CheckpointError for a file that is missing, damaged or holds anything else; nothing in it has run then.
    """
    try:
        with torch.serialization.safe_globals(_allowed()):
            mapped = mmap and zipfile.is_zipfile(path)
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path, error)) from None
    except _READ_ERRORS as error:
        raise CheckpointError(_damaged(path, error)) from None


def verify_file(path: str) -> None:
    """Hold a file's contents against the checksums in it, which torch.load does not do.

    Raises CheckpointError if they differ. Files in torch's oldest format have no checksums and pass.
    """
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(_damaged(path, error)) from None
    if changed is not None:
        raise CheckpointError(_damaged(path, f"{changed} does not have its checksum"))


class Checksums:
    """The checksums in a `.pt` file, to hold tensors of it against as they are used, and not the whole file at once.

    Raises CheckpointError if what the file says of its tensors is damaged. Files in torch's oldest format have none.
    """

    def __init__(self, path: str):
        self._path = path
        self._known: Optional[Set[Tuple[int, int]]] = None
        if not zipfile.is_zipfile(path):
            return
        try:
            with zipfile.ZipFile(path) as archive:
                records = archive.infolist()
                for record in records:
                    if "/data/" not in record.filename:
                        archive.read(record)  # compares it with its checksum
        except (zipfile.BadZipFile, OSError) as error:
            raise CheckpointError(_damaged(path, error)) from None
        self._known = {(record.file_size, record.CRC) for record in records}

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises CheckpointError if the memory that a tensor is in, or a part of, is not as it was saved.

        That is looked for by its size and checksum, because loading does not tell where in the file a tensor was.
        """
        if self._known is None:
            return
        storage = tensor.untyped_storage()
        contents = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        if (storage.nbytes(), zlib.crc32(contents)) not in self._known:
            raise CheckpointError(_damaged(self._path, f"{name} does not have its checksum"))


def save_file(contents: Any, path: str, zipped: bool = True) -> None:
    """torch.save that returns only when the bytes are on the disk. Raises CheckpointError if they cannot be."""
    try:
        with open(path, "wb") as file:
            torch.save(contents, file, _use_new_zipfile_serialization=zipped)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {path} ({_first_line(error)}); is the disk full?") from error


class SafeCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's file access, restricted: reads accept no foreign objects, writes reach the disk.

    Weights are read under today's names; keep_frequencies: see `legacy.current_file`.
    """

    def __init__(self, config_params=None, keep_optimizer: bool = True, keep_frequencies: bool = True):
        super().__init__(config_params)
        self.keep_optimizer = keep_optimizer
        self.keep_frequencies = keep_frequencies
        self._failure = None

    def load(self, path, map_location=None):
        return current_file(load_file(path, map_location), self.keep_frequencies)

    def save(self, state_dict, path):
        if not self.keep_optimizer:
            if path.endswith("_optim_states.pt"):
                return
            if "optimizer" in state_dict and "ds_version" in state_dict:
                state_dict = {**state_dict, "optimizer": None}
        try:
            save_file(state_dict, path, self.zipfile_serialization)
        except CheckpointError as error:
            # Raised later by raise_failure: the other ranks are about to wait for this one at a barrier.
            self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise the first CheckpointError that a save on this rank met."""
        if self._failure is not None:
            raise self._failure


def use_safe_files(engine, keep_optimizer: bool = True) -> SafeCheckpointEngine:
    """Make a DeepSpeed engine read and write through the SafeCheckpointEngine returned.

    Raises CheckpointError if the DeepSpeed config chose another writer, which has no safe way of reading.
    """
    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
        raise CheckpointError(
            f"the DeepSpeed config asks for the checkpoint writer {type(engine.checkpoint_engine).__name__}; only the "
            "standard one is supported: remove `writer` from `checkpoint` and `datastates_ckpt`"
        )
    keep_frequencies = any(is_unused_buffer(name) for name, _ in engine.module.named_buffers())
    engine.checkpoint_engine = SafeCheckpointEngine(engine._config, keep_optimizer, keep_frequencies)
    return engine.checkpoint_engine


@cache
def _allowed() -> List[Any]:
    """numpy's parts of a random state, under the module names of numpy 1 and 2, and DeepSpeed's records.

    BytesIO is what Transformer Engine 1.12 and GPT-NeoX keep FP8 scaling factors in: bytes, which stay unread here.
    """
    reconstruct = np.empty(0).__reduce__()[0]
    numpy_parts = [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [*numpy_parts, np.ndarray, np.dtype, type(np.dtype(np.uint32)), io.BytesIO, *_deepspeed_classes()]


def _deepspeed_classes() -> List[type]:
    found = []
    for path in _DEEPSPEED_CLASSES:
        module, _, name = path.rpartition(".")
        if importlib.util.find_spec(module) is not None:
            found.append(getattr(importlib.import_module(module), name, None))
    return [each for each in found if each is not None]


def _refusal(path: str, error: Exception) -> str:
    if "GLOBAL" in str(error) or "global" in str(error):
        wanted = str(error).partition("GLOBAL ")[2].split(" ")[0] or "an object"
        return (
            f"{path} is refused: to read it, {wanted} would have to be called, which is not part of a model. Nothing "
            "in it was run. Use a file from a source you trust, saved as tensors and plain values"
        )
    return _damaged(path, error)


def _damaged(path: str, reason: Any) -> str:
    return f"{path} is damaged or not complete ({_first_line(reason)}); load another iteration or a copy of it"


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
