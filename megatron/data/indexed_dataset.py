"""Token sequences in a pair of files: `PREFIX.bin` holds the items, `PREFIX.idx` says where each sequence lies.

Layout of the .idx file (little endian), as GPT-NeoX and fairseq write it:

    9 bytes   b"MMIDIDX\\0\\0"
    u64       version, 1
    u8        item type, see DTYPES
    u64       N, number of sequences
    u64       D, length of the document index
    N x i32   length of each sequence, in items
    N x i64   byte offset of each sequence in the .bin file
    D x i64   document index: 0, then the running number of sequences after each document

The .bin file is the items back to back, without a header. Nothing here needs torch.
"""

import os
import shutil
import struct
from typing import List, Optional, Tuple

import numpy as np

from megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
CACHED_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f4"),
    7: np.dtype("<f8"),
    8: np.dtype("<u2"),
}

LARGEST_UINT16_VOCAB = 65500
"""GPT-NeoX stores uint16 items for vocabularies below this."""


def index_file_path(prefix: str) -> str:
    """`PREFIX.idx`."""
    return prefix + ".idx"


def data_file_path(prefix: str) -> str:
    """`PREFIX.bin`."""
    return prefix + ".bin"


def best_fitting_dtype(vocab_size: Optional[int] = None) -> np.dtype:
    """The item type GPT-NeoX chooses for a vocabulary: uint16 where it fits, else int32."""
    if vocab_size is not None and vocab_size < LARGEST_UINT16_VOCAB:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


def dtype_code(dtype) -> int:
    """The number that stands for an item type in the .idx file. Raises ValueError for any other type."""
    wanted = np.dtype(dtype)
    for code, known in DTYPES.items():
        if known == wanted:
            return code
    raise ValueError(f"items of type {wanted} have no code in the .idx format")


def infer_dataset_impl(prefix: str) -> str:
    """Which format the files of `prefix` are in: "mmap" or "cached". Raises DataError if neither."""
    _require_files(prefix)
    with open(index_file_path(prefix), "rb") as stream:
        magic = stream.read(len(MAGIC))
    if magic == MAGIC:
        return "mmap"
    if magic.startswith(CACHED_MAGIC):
        return "cached"
    raise DataError(
        f"{index_file_path(prefix)} is not a token index: it begins with {magic!r}, not {MAGIC!r}. "
        "Make it with tools/datasets/preprocess_data.py"
    )


def make_dataset(prefix: str, impl: str = "infer", skip_warmup: bool = True) -> "MMapIndexedDataset":
    """Open the data set at `prefix` (a path without .bin or .idx).

    impl is the config's data_impl. `cached` (TNTIDX) files cannot be read at random and are refused.
    Raises DataError if the files are missing, foreign, truncated or of the refused kind.
    """
    found = infer_dataset_impl(prefix)
    if found == "cached" or impl == "cached":
        raise DataError(
            f"data_impl={impl}: {index_file_path(prefix)} is in the {found!r} format and only 'mmap' is read; "
            "make the data again with tools/datasets/preprocess_data.py --dataset-impl mmap, and set data_impl=mmap"
        )
    return MMapIndexedDataset(prefix, skip_warmup)


class MMapIndexedDataset:
    """Read access to one data set. Sequences are views of the memory-mapped file and must not be written to."""

    def __init__(self, prefix: str, skip_warmup: bool = True):
        """skip_warmup False reads both files once, so that later random reads come from the page cache.

        Raises DataError if a file is missing, or its length does not fit the index.
        """
        self.prefix = prefix
        _require_files(prefix)
        self.dtype, self.sizes, self.pointers, self.doc_idx = _read_index(index_file_path(prefix))
        _check_data_file(prefix, self.dtype, self.sizes, self.pointers)
        if not skip_warmup:
            _read_through(index_file_path(prefix))
            _read_through(data_file_path(prefix))
        self._items = np.asarray(np.memmap(data_file_path(prefix), mode="r", dtype=np.uint8))

    def __reduce__(self):
        # Loader workers that are not forked open the files again rather than receive a copy of the data.
        return type(self), (self.prefix,)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self.get(number) for number in range(*index.indices(len(self)))]
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: Optional[int] = None) -> np.ndarray:
        """`length` items of sequence `index` from item `offset` on; to its end if length is None.

        Raises IndexError outside the data set or the sequence.
        """
        if not 0 <= index < len(self.sizes):
            raise IndexError(f"sequence {index} of {len(self.sizes)} in {self.prefix}")
        size = int(self.sizes[index])
        length = size - offset if length is None else int(length)
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"items {offset} to {offset + length} of the {size} of sequence {index} in {self.prefix}")
        start = int(self.pointers[index]) + int(offset) * self.dtype.itemsize
        return self._items[start : start + length * self.dtype.itemsize].view(self.dtype)

    @staticmethod
    def exists(prefix: str) -> bool:
        """Both files are there."""
        return os.path.isfile(index_file_path(prefix)) and os.path.isfile(data_file_path(prefix))


class MMapIndexedDatasetBuilder:
    """Writes a data set. The files appear under their own names only when `finalize` has written all of them."""

    def __init__(self, out_file: str, dtype=np.int32):
        """out_file is the path of the .bin file. Raises ValueError for an item type the format lacks."""
        self.dtype = np.dtype(dtype)
        self._code = dtype_code(self.dtype)
        self._out_file = out_file
        self._temporary = _temporary_name(out_file)
        self._stream = open(self._temporary, "wb")
        self._sizes: List[int] = []
        self._doc_idx = [0]

    def add_item(self, items) -> None:
        """Append one sequence. Raises ValueError or OverflowError if an item does not fit the item type."""
        array = np.asarray(items)
        if array.dtype != self.dtype:
            array = _exact_cast(array, self.dtype)
        self._stream.write(array.tobytes(order="C"))
        self._sizes.append(array.size)

    def end_document(self) -> None:
        """The sequences since the last call are one document."""
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, prefix: str) -> None:
        """Append another data set of the same item type, documents included. Raises DataError if it differs."""
        other = MMapIndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{prefix} has items of type {other.dtype} and cannot be appended to {self.dtype} items: "
                "tokenize both with the same vocabulary"
            )
        if int(other.sizes.sum(dtype=np.int64)) * self.dtype.itemsize != os.path.getsize(data_file_path(prefix)):
            raise DataError(f"{data_file_path(prefix)} is not its sequences back to back; make it again")
        with open(data_file_path(prefix), "rb") as stream:
            shutil.copyfileobj(stream, self._stream)
        before = len(self._sizes)
        self._sizes.extend(other.sizes.tolist())
        self._doc_idx.extend((other.doc_idx[1:] + before).tolist())

    def finalize(self, index_file: str) -> None:
        """Write the index and put both files in place."""
        self._stream.close()
        temporary_index = _temporary_name(index_file)
        try:
            with open(temporary_index, "wb") as stream:
                _write_index(stream, self._code, self.dtype.itemsize, self._sizes, self._doc_idx)
            # An old index must never stand beside the new data: without an index the reader says what is missing.
            if os.path.exists(index_file):
                os.remove(index_file)
            os.replace(self._temporary, self._out_file)
            os.replace(temporary_index, index_file)
        except BaseException:
            _remove_if_there(temporary_index)
            self.abandon()
            raise

    def abandon(self) -> None:
        """Give up: remove what was written, leave any earlier data set as it was."""
        self._stream.close()
        _remove_if_there(self._temporary)


def make_builder(out_file: str, impl: str = "mmap", vocab_size: Optional[int] = None) -> MMapIndexedDatasetBuilder:
    """A builder whose item type fits the vocabulary. Raises DataError for a format other than mmap."""
    if impl != "mmap":
        raise DataError(f"dataset-impl={impl}: only 'mmap' data sets are written and read; use --dataset-impl mmap")
    return MMapIndexedDatasetBuilder(out_file, best_fitting_dtype(vocab_size))


def _require_files(prefix: str) -> None:
    missing = [path for path in (index_file_path(prefix), data_file_path(prefix)) if not os.path.isfile(path)]
    if missing:
        hint = " (give the path without .bin or .idx)" if prefix.endswith((".bin", ".idx")) else ""
        raise DataError(
            f"data set {prefix}: {' and '.join(missing)} not found{hint}; make it with prepare_data.py or "
            "tools/datasets/preprocess_data.py"
        )


def _read_index(path: str) -> Tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Item type, lengths [N], byte offsets [N] and document index [D], once the file's length agrees with them."""
    length = os.path.getsize(path)
    with open(path, "rb") as stream:
        header = stream.read(HEADER.size)
    if not header.startswith(MAGIC):
        raise DataError(f"{path} is not a token index: it begins with {header[:9]!r}, not {MAGIC!r}")
    if len(header) < HEADER.size:
        raise DataError(f"{path} is truncated: {length} bytes, and the header alone takes {HEADER.size}")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise DataError(f"{path} has version {version} and item type {code}; version {VERSION}, types 1 to 8 are known")
    expected = HEADER.size + sequences * (4 + 8) + documents * 8
    if length != expected:
        raise DataError(
            f"{path} is {'truncated' if length < expected else 'damaged'}: it has {length} bytes, and "
            f"{sequences} sequences in {documents} document entries take {expected}; make it again"
        )
    buffer = np.memmap(path, mode="r", dtype=np.uint8)
    pointers_at = HEADER.size + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    return (
        DTYPES[code],
        np.frombuffer(buffer, np.dtype("<i4"), sequences, HEADER.size),
        np.frombuffer(buffer, np.dtype("<i8"), sequences, pointers_at),
        np.frombuffer(buffer, np.dtype("<i8"), documents, documents_at),
    )


def _check_data_file(prefix: str, dtype: np.dtype, sizes: np.ndarray, pointers: np.ndarray) -> None:
    """The last item of the index must be the last item of the data file."""
    path, length = data_file_path(prefix), os.path.getsize(data_file_path(prefix))
    if len(sizes) == 0 or int(sizes.max()) == 0:
        raise DataError(f"data set {prefix} is empty: no tokens in {path}")
    if int(sizes.min()) < 0 or int(pointers.min()) < 0:
        raise DataError(f"{index_file_path(prefix)} is damaged: negative lengths or offsets; make it again")
    end = int((pointers + sizes.astype(np.int64) * dtype.itemsize).max())
    if end != length:
        kind = "is truncated" if length < end else "does not belong to its index"
        raise DataError(f"{path} {kind}: it has {length} bytes, its index describes {end}; make both files again")


def _write_index(stream, code: int, itemsize: int, sizes: List[int], doc_idx: List[int]) -> None:
    lengths = np.asarray(sizes, dtype=np.int64)
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1] * itemsize, out=pointers[1:])
    stream.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(doc_idx)))
    stream.write(_exact_cast(lengths, np.dtype("<i4")).tobytes())
    stream.write(pointers.tobytes())
    stream.write(np.asarray(doc_idx, dtype="<i8").tobytes())


def _exact_cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """array as dtype. Raises ValueError if that changes a value."""
    cast = array.astype(dtype)
    if not np.array_equal(cast, array):
        raise ValueError(f"values from {array.min()} to {array.max()} do not fit items of type {dtype}")
    return cast


def _temporary_name(path: str) -> str:
    return f"{path}.tmp{os.getpid()}"


def _remove_if_there(path: str) -> None:
    try:
        os.remove(path)
    except FileNotFoundError:
        pass


def _read_through(path: str) -> None:
    with open(path, "rb") as stream:
        while stream.read(64 * 1024 * 1024):
            pass
