"""Data sets that prepare_data.py makes by name: text every Python installation has, or a local file."""

import hashlib
import json
import os
import platform
import sysconfig
import time
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.train_tokenizer import train_tokenizer
from tools.datasets.preprocess_data import EncoderSettings, preprocess
from tools.datasets.text_files import Document, find_input_files, read_documents

PYDOCS = "pydocs"
PYDOCS_BYTES = 8_000_000
"""Default size of pydocs: a few minutes of training of a small model, prepared in seconds."""

TOKENIZER_TRAINING_BYTES = 100_000_000
"""A tokenizer is trained on no more text than this; the most frequent pairs are settled long before."""

DOWNLOADED_BY_GPT_NEOX = (
    "arxiv books1 books3 c4 c4_openwebtext enron enwik8 europarl freelaw github hackernews nih openwebtext2 pile "
    "pile_subset pubmed stackexchange ubuntu_irc youtube_subtitles"
).split()

LEFT_OUT_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
"""Of the standard library: others' packages, tests (odd on purpose) and character tables."""


@dataclass(frozen=True)
class Preparation:
    """What is to be made; see prepare_data.py --help."""

    dataset: str = PYDOCS
    tokenizer_type: str = "HFTokenizer"
    data_dir: str = "data"
    vocab_file: Optional[str] = None
    merge_file: Optional[str] = None
    vocab_size: int = 4096
    max_bytes: Optional[int] = None
    workers: int = 1
    force: bool = False

    @property
    def name(self) -> str:
        """Folder and file name of the output: the data set's, or the (first) file's without endings."""
        return os.path.basename(os.path.normpath(self.dataset.split(",")[0])).split(".")[0]

    @property
    def folder(self) -> str:
        return os.path.join(self.data_dir, self.name)

    @property
    def data_path(self) -> str:
        """As in a config: without .bin and .idx."""
        return os.path.join(self.folder, f"{self.name}_text_document")

    @property
    def trains_tokenizer(self) -> bool:
        return self.vocab_file is None and self.tokenizer_type == "HFTokenizer"

    @property
    def tokenizer_file(self) -> Optional[str]:
        """As vocab_file in a config."""
        return os.path.join(self.folder, "tokenizer.json") if self.trains_tokenizer else self.vocab_file

    @property
    def manifest_file(self) -> str:
        return os.path.join(self.folder, "manifest.json")

    @property
    def outputs(self) -> list:
        made = [f"{self.data_path}.bin", f"{self.data_path}.idx"]
        return made + [self.tokenizer_file] if self.trains_tokenizer else made


def prepare_dataset(preparation: Preparation) -> bool:
    """Make the data set, and a tokenizer for it where none is given. False if all of it is there already.

    Raises ConfigError for a name that cannot be made, DataError for bad files.
    """
    request = _request(preparation)
    if not preparation.force and _is_made(preparation, request):
        return False
    try:
        os.makedirs(preparation.folder, exist_ok=True)
    except OSError as error:
        raise DataError(f"--data-dir: cannot make the folder {preparation.folder}: {error.strerror}") from error
    if preparation.trains_tokenizer:
        # Put in place only with the data that belong to it.
        new_tokenizer = f"{preparation.tokenizer_file}.new"
        try:
            _train(preparation, new_tokenizer)
            _tokenize(preparation, new_tokenizer)
            os.replace(new_tokenizer, preparation.tokenizer_file)
        finally:
            if os.path.exists(new_tokenizer):
                os.remove(new_tokenizer)
    else:
        _tokenize(preparation, preparation.vocab_file)
    _write_json(preparation.manifest_file, {"request": request, "bytes": _sizes(preparation.outputs)})
    return True


def pydocs() -> Iterator[Document]:
    """The texts behind Python's help() and the sources of the standard library, in an order that is fixed but mixed,
    so that every part of it has some of everything."""
    texts = {f"pydoc topic {name}": text for name, text in _pydoc_topics().items()}
    root = sysconfig.get_paths()["stdlib"]
    for path in _python_files(root):
        try:
            with open(path, encoding="utf-8") as stream:
                texts[os.path.relpath(path, root)] = stream.read()
        except (UnicodeDecodeError, OSError):
            continue  # the few sources in another encoding
    if not texts:
        raise DataError(f"no Python sources in {root}; give a text file instead of {PYDOCS}")
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        yield Document({"text": texts[name]}, name)


def limit_bytes(documents: Iterable[Document], most: Optional[int]) -> Iterator[Document]:
    """The documents that fit, in order, into so many bytes of UTF-8; all of them if None."""
    left = most
    for document in documents:
        size = len(document.texts["text"].encode("utf-8", errors="replace"))
        if left is None or size <= left:
            yield document
            left = None if left is None else left - size


def _documents(preparation: Preparation) -> Iterator[Document]:
    if preparation.dataset == PYDOCS:
        return limit_bytes(pydocs(), preparation.max_bytes or PYDOCS_BYTES)
    files = find_input_files(preparation.dataset)
    return limit_bytes((document for path in files for document in read_documents(path)), preparation.max_bytes)


def _tokenize(preparation: Preparation, vocab_file: Optional[str]) -> None:
    settings = EncoderSettings(preparation.tokenizer_type, vocab_file, preparation.merge_file, append_eod=True)
    prefix = os.path.join(preparation.folder, preparation.name)
    count = preprocess(_documents(preparation), settings, prefix, workers=preparation.workers)
    print(f"> {count} documents in {preparation.data_path}.bin and .idx")


def _train(preparation: Preparation, path: str) -> None:
    start = time.time()
    sample = limit_bytes(_documents(preparation), TOKENIZER_TRAINING_BYTES)
    texts = (document.texts["text"] for document in sample)
    size = train_tokenizer(texts, path, vocab_size=preparation.vocab_size)
    print(
        f"> trained a tokenizer of {size} tokens in {time.time() - start:.1f} s: {preparation.tokenizer_file}",
        flush=True,
    )


def _pydoc_topics() -> dict:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out of their smallest Python
        return {}
    return topics


def _python_files(root: str) -> Iterator[str]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - LEFT_OUT_FOLDERS)
        for name in sorted(names):
            # topics.py is the help texts once more, as string literals.
            if name.endswith(".py") and name != "topics.py":
                yield os.path.join(folder, name)


def _request(preparation: Preparation) -> dict:
    """Everything the output depends on. Raises ConfigError or DataError if it cannot be made."""
    if preparation.dataset == PYDOCS:
        source = {"python": platform.python_version(), "max_bytes": preparation.max_bytes or PYDOCS_BYTES}
    elif os.path.exists(preparation.dataset.split(",")[0]):
        files = find_input_files(preparation.dataset)
        source = {"files": [_identity(path) for path in files], "max_bytes": preparation.max_bytes}
    else:
        raise _unknown(preparation.dataset)
    tokenizer = {"type": preparation.tokenizer_type}
    if preparation.trains_tokenizer:
        tokenizer["vocab_size"] = preparation.vocab_size
    for path in (preparation.vocab_file, preparation.merge_file):
        if path is not None:
            tokenizer[path] = _identity(path)
    return {"source": source, "tokenizer": tokenizer}


def _unknown(dataset: str) -> ConfigError:
    if dataset in DOWNLOADED_BY_GPT_NEOX:
        return ConfigError(
            f"dataset {dataset!r}: nothing is downloaded here. Fetch it as .jsonl (one record with the key 'text' a "
            f"line) or .txt and run `python prepare_data.py path/to/{dataset}.jsonl`, or use {PYDOCS!r}"
        )
    return ConfigError(f"dataset {dataset!r} is neither {PYDOCS!r} nor a file or folder of .jsonl or .txt texts")


def _identity(path: str) -> list:
    """Path, size and time of change of a file; the name alone if it is none (a hub or encoding name)."""
    if not os.path.exists(path):
        return [path]
    state = os.stat(path)
    return [os.path.abspath(path), state.st_size, state.st_mtime_ns]


def _is_made(preparation: Preparation, request: dict) -> bool:
    try:
        with open(preparation.manifest_file, encoding="utf-8") as stream:
            manifest = json.load(stream)
        return manifest == {"request": request, "bytes": _sizes(preparation.outputs)}
    except (OSError, ValueError):
        return False


def _sizes(paths) -> list:
    return [os.path.getsize(path) for path in paths]


def _write_json(path: str, value: dict) -> None:
    temporary = f"{path}.tmp{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
    os.replace(temporary, path)
