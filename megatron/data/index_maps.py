"""Which tokens make up which training sample: three arrays, cached as .npy files beside the data.

    doc_idx      the documents in the order in which they are read, all epochs together
    sample_idx   [n + 1, 2]: sample i begins at (position in doc_idx, offset in that document) = sample_idx[i]
    shuffle_idx  the order in which samples are handed out

The arrays, their types and their file names are GPT-NeoX's, so its caches are used and ours work there.
"""

import os
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megatron.data.sync import agree, is_builder, print_rank_0
from megatron.errors import DataError

MOST_ROWS_CHECKED = 1_000_000
"""Of a cached sample_idx, to tell whether it belongs to the data."""

PARTS = ("doc_idx", "sample_idx", "shuffle_idx")


@dataclass(frozen=True)
class SampleRequest:
    """Everything the three arrays depend on."""

    name: str
    data_prefix: str
    documents: np.ndarray
    """int32, ascending: the documents of this split."""
    sizes: np.ndarray
    """int32: length in tokens of every document of the data set."""
    num_samples: Optional[int]
    num_epochs: Optional[int]
    """Exactly so many passes; None: as many as num_samples need."""
    seq_length: int
    seed: int
    pack_impl: str = "packed"
    allow_chopped: bool = True
    label_dataset: Optional[object] = None

    def file_name(self, part: str) -> str:
        """Path of one array's cache."""
        chopped = "_ac" if self.allow_chopped else ""
        return (
            f"{self.data_prefix}_{self.name}_indexmap_{self.num_samples}ns_{self.seq_length}sl_{self.seed}s_"
            f"{self.pack_impl}pi{chopped}_{part}.npy"
        )

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens in one pass over the documents."""
        return int(self.sizes[self.documents].sum(dtype=np.int64))

    @property
    def epochs(self) -> int:
        """Passes over the documents: the fewest e with (e * tokens - 1) // seq_length >= num_samples.

        A sample has seq_length + 1 tokens and shares its last one with the next, hence the 1.
        """
        if self.num_epochs:
            return self.num_epochs
        needed = self.num_samples * self.seq_length + 1
        return max(1, -(-needed // self.tokens_per_epoch))


class IndexMaps:
    """The three arrays of one request, memory-mapped from their files."""

    def __init__(self, paths):
        self.paths = tuple(paths)
        self.doc_idx, self.sample_idx, self.shuffle_idx = (np.load(path, mmap_mode="r") for path in self.paths)

    def __reduce__(self):
        return type(self), (self.paths,)

    def __len__(self) -> int:
        """Samples: sample_idx has one more row, the end of the last sample."""
        return min(len(self.shuffle_idx), len(self.sample_idx) - 1)


def load_or_build(request: SampleRequest, use_shared_fs: bool = True) -> IndexMaps:
    """Open the request's arrays, after one process (one on each host without a shared file system) has built them
    if they are absent or belong to other data.

    Every process must call this. Raises DataError on all of them if the arrays cannot be built or written.
    """
    error = None
    if is_builder(use_shared_fs):
        try:
            _build_if_needed(request)
        except DataError as problem:
            error = problem
    agree(error, f"the index maps of {request.data_prefix} ({request.name})")
    try:
        return IndexMaps(request.file_name(part) for part in PARTS)
    except FileNotFoundError as missing:
        raise DataError(
            f"index map {missing.filename} was built on another host and is not on this one; set use_shared_fs=false "
            "where hosts share no file system"
        ) from missing


def build(request: SampleRequest):
    """doc_idx, sample_idx, shuffle_idx of a request. Raises DataError if its documents give no sample."""
    if len(request.documents) == 0 or request.tokens_per_epoch == 0:
        raise DataError(f"data set {request.data_prefix}: no tokens in the documents of the {request.name} split")
    builders = {"packed": _packed, "pack_until_overflow": _until_overflow, "unpacked": _unpacked}
    maps = builders[request.pack_impl](request, np.random.RandomState(seed=request.seed))
    if len(maps[2]) == 0 and request.num_samples != 0:
        raise DataError(
            f"data set {request.data_prefix}: the {request.name} split has {request.tokens_per_epoch} tokens, fewer "
            f"than one sample of seq_length={request.seq_length} + 1; use more data or a shorter seq_length"
        )
    return maps


def sample_positions(lengths: np.ndarray, seq_length: int, samples: np.ndarray) -> np.ndarray:
    """[len(samples), 2]: for each sample number k, the document (in reading order) and the offset of token
    k * seq_length, which is the last token of sample k - 1 and the first of sample k.

    lengths: tokens of each document in reading order.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = samples.astype(np.int64) * seq_length
    documents = np.searchsorted(ends, tokens, side="right")
    positions = np.stack([documents, tokens - (ends - lengths)[documents]], axis=1)
    positions[tokens == 0] = 0  # reading begins with the first document even if that one is empty
    return positions


def _packed(request: SampleRequest, random):
    """All documents in one random stream, cut every seq_length tokens."""
    documents = np.tile(np.asarray(request.documents, dtype=np.int32), request.epochs)
    random.shuffle(documents)
    tokens = request.epochs * request.tokens_per_epoch
    samples = (tokens - 1) // request.seq_length
    positions = sample_positions(request.sizes[documents], request.seq_length, np.arange(samples + 1))
    # GPT-NeoX's rule for the width of the file, with its own fractional number of samples.
    narrow = 2 * ((tokens - 1) / request.seq_length + 1) < np.iinfo(np.int32).max
    order = np.arange(samples, dtype=np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)
    random.shuffle(order)
    return documents, positions.astype(np.int32 if narrow else np.int64), order


def _until_overflow(request: SampleRequest, random):
    """Whole documents are packed until the next does not fit; then a new sample begins with it."""
    usable = _usable_documents(request)
    order = np.arange(request.num_samples)
    random.shuffle(order)
    queue = np.arange(len(request.documents))
    random.shuffle(queue)
    documents, starts, filled, position = [], [], 0, 0
    while len(starts) < request.num_samples:
        number = queue[position]
        if usable[number]:
            length = int(request.sizes[request.documents[number]])
            if filled == 0 or filled + length > request.seq_length + 1:
                starts.append(len(documents))
                filled = 0
            filled += length
            documents.append(request.documents[number])
        position += 1
        if position == len(queue):
            position = 0
            random.shuffle(queue)
    starts.append(len(documents))
    return np.array(documents, dtype=np.int64), _whole_documents(starts), order


def _unpacked(request: SampleRequest, random):
    """One document is one sample."""
    order = np.arange(request.num_samples)
    random.shuffle(order)
    usable = request.documents[_usable_documents(request)]
    documents = np.resize(usable, request.num_samples + 1).astype(np.int64)
    return documents, _whole_documents(range(request.num_samples + 1)), order


def _whole_documents(starts) -> np.ndarray:
    """sample_idx of samples that begin at the start of a document."""
    starts = np.asarray(starts, dtype=np.int64)
    return np.stack([starts, np.zeros_like(starts)], axis=1)


def _usable_documents(request: SampleRequest) -> np.ndarray:
    """Which documents of the split can be a sample: not empty, not to be chopped against the user's wish, and with at
    least one label that counts."""
    longest = request.seq_length + 1
    lengths = request.sizes[request.documents]
    usable = lengths > 0
    if not request.allow_chopped:
        usable &= lengths <= longest
    if request.label_dataset is not None:
        for number in np.flatnonzero(usable):
            usable[number] = np.any(request.label_dataset.get(request.documents[number])[:longest] != -100)
    if not usable.any():
        raise DataError(
            f"data set {request.data_prefix}: no document of the {request.name} split can be used with "
            f"pack_impl={request.pack_impl}: each is empty, has only ignored labels, or is longer than "
            f"seq_length={request.seq_length} + 1 with allow_chopped={request.allow_chopped}"
        )
    return usable


def _build_if_needed(request: SampleRequest) -> None:
    paths = [request.file_name(part) for part in PARTS]
    if all(os.path.isfile(path) for path in paths):
        reason = _why_stale(request, paths)
        if reason is None:
            return
        print_rank_0(f"> index maps {paths[0]} belong to other data ({reason}): building them again")
    maps = build(request)
    for path, array in zip(paths, maps, strict=True):
        _save_array(path, array)
    print_rank_0(f"> built index maps of {request.data_prefix} ({request.name}): {len(maps[2])} samples")


def _why_stale(request: SampleRequest, paths) -> Optional[str]:
    """Why cached arrays cannot be this request's, or None. File names do not tell: they leave out the split and the
    contents of the data file. Costs one pass over doc_idx."""
    try:
        maps = IndexMaps(paths)
    except (ValueError, OSError, EOFError) as error:
        return f"unreadable: {error}"
    if maps.sample_idx.ndim != 2 or len(maps.sample_idx) != len(maps.shuffle_idx) + 1 or len(maps.doc_idx) == 0:
        return "the three arrays do not fit each other"
    in_split = np.zeros(len(request.sizes), dtype=bool)
    in_split[request.documents] = True
    if maps.doc_idx.min() < 0 or maps.doc_idx.max() >= len(in_split) or not in_split[maps.doc_idx].all():
        return "documents outside the split"
    if request.pack_impl != "packed":
        return None if len(maps) == request.num_samples else "another number of samples"
    if len(maps.doc_idx) != request.epochs * len(request.documents):
        return "another number of documents"
    samples = (request.epochs * request.tokens_per_epoch - 1) // request.seq_length
    if len(maps) != samples:
        return "another number of tokens"
    # Every row of ordinary data; of very large data so many, evenly spread, that a difference cannot hide.
    rows = np.unique(np.linspace(0, samples, num=min(samples + 1, MOST_ROWS_CHECKED), dtype=np.int64))
    expected = sample_positions(request.sizes[maps.doc_idx], request.seq_length, rows)
    return None if np.array_equal(expected, maps.sample_idx[rows]) else "documents of other lengths"


def _save_array(path: str, array: np.ndarray) -> None:
    """np.save under a temporary name, then rename. Raises DataError if the folder cannot be written to."""
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        with open(temporary, "wb") as stream:
            np.save(stream, array)
        os.replace(temporary, path)
    except OSError as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise DataError(
            f"cannot write the index map {path}: {error.strerror}; index maps lie beside the data, so make the folder "
            f"{os.path.dirname(path) or '.'} writable (or copy the data to one that is)"
        ) from error
