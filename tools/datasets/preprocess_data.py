"""Tokenizes text files into the .bin/.idx data sets that training reads.

    python tools/datasets/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HFTokenizer --vocab-file data/tokenizer.json --append-eod --workers 4

writes data/corpus_text_document.bin and .idx. Options are GPT-NeoX's.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Dict, Iterable, Iterator, List, Tuple

import numpy as np
from tqdm import tqdm

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)))

from megatron.data.indexed_dataset import make_builder  # noqa: E402
from megatron.errors import DataError, NeoXError  # noqa: E402
from megatron.tokenizer import TOKENIZERS, build_tokenizer  # noqa: E402
from tools.datasets.text_files import Document, find_input_files, read_documents  # noqa: E402

CHUNK = 32
"""Documents sent to a worker at a time."""
CHUNK_CHARACTERS = 1_000_000
"""A chunk with more text than this is sent early, so that books do not pile up."""


@dataclass(frozen=True)
class EncoderSettings:
    """What a worker needs in order to tokenize, in the names that build_tokenizer reads."""

    tokenizer_type: str
    vocab_file: str = None
    merge_file: str = None
    append_eod: bool = False
    ftfy: bool = False


class Encoder:
    """Documents to token numbers."""

    def __init__(self, settings: EncoderSettings):
        """Raises as build_tokenizer does; DataError if the end-of-document token or ftfy is wanted and absent."""
        self.tokenizer = build_tokenizer(settings)
        self.suffix = [self.tokenizer.eod] if settings.append_eod else []
        self.clean = _ftfy() if settings.ftfy else str

    def encode(self, documents: List[Document]) -> List[Tuple[Dict[str, np.ndarray], int]]:
        """For each document, the token numbers by key and the bytes of text. Raises DataError naming a bad document.

        They are arrays: the process that gets them from a worker would read lists of numbers fifty times as long.
        """
        return [self._encode_one(document) for document in documents]

    def _encode_one(self, document: Document):
        try:
            texts = {key: self.clean(text) for key, text in document.texts.items()}
            size = sum(len(text.encode("utf-8")) for text in texts.values())
            return {key: self._tokens(text) for key, text in texts.items()}, size
        except UnicodeEncodeError as error:
            raise DataError(f"{document.place}: the text has half of a surrogate pair ({error.reason})") from error

    def _tokens(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.tokenize_batch([text])[0] + self.suffix, dtype=np.int32)


def preprocess(
    documents: Iterable[Document],
    settings: EncoderSettings,
    output_prefix: str,
    keys=("text",),
    workers: int = 1,
    num_docs: int = None,
    log_interval: int = 100,
) -> int:
    """Tokenize documents into OUTPUT_PREFIX_KEY_document.{bin,idx}, one data set for each key; returns their number.

    Documents whose texts are all empty are left out. Nothing is left behind if any document fails.
    Raises DataError for bad documents, for none at all, and for an output folder that cannot be written to.
    """
    encoder = Encoder(settings)
    prefixes = {key: f"{output_prefix}_{key}_document" for key in keys}
    builders = _make_builders(prefixes, encoder.tokenizer.vocab_size)
    try:
        wanted = (document for document in documents if any(document.texts.values()))
        encoded = _encode_all(wanted, encoder, settings, workers)
        count = _write_all(encoded, builders, num_docs, log_interval)
        if count == 0:
            raise DataError("the input has no text: every document is empty")
        for key, prefix in prefixes.items():
            builders[key].finalize(f"{prefix}.idx")
    except BaseException:
        for builder in builders.values():
            builder.abandon()
        raise
    return count


def _make_builders(prefixes: Dict[str, str], vocab_size: int) -> dict:
    folder = os.path.dirname(next(iter(prefixes.values()))) or "."
    try:
        os.makedirs(folder, exist_ok=True)
        return {key: make_builder(f"{prefix}.bin", "mmap", vocab_size) for key, prefix in prefixes.items()}
    except OSError as error:
        raise DataError(f"--output-prefix: cannot write to the folder {folder}: {error.strerror}") from error


def _encode_all(documents, encoder: Encoder, settings: EncoderSettings, workers: int) -> Iterator:
    """Encoded documents in the order of the input."""
    if workers <= 1:
        for chunk in _chunks(documents):
            yield from encoder.encode(chunk)
        return
    # Not forked: the tokenizers library may have started threads here, and a fork would lose them.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(settings,))
    waiting = deque()
    try:
        for chunk in _chunks(documents):
            waiting.append(pool.submit(_encode_in_worker, chunk))
            if len(waiting) >= 4 * workers:  # read no further ahead than this
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker process ended early, perhaps for lack of memory; try fewer --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _chunks(documents: Iterable[Document]) -> Iterator[List[Document]]:
    chunk, characters = [], 0
    for document in documents:
        chunk.append(document)
        characters += sum(len(text) for text in document.texts.values())
        if len(chunk) == CHUNK or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


_worker_encoder = None


def _start_worker(settings: EncoderSettings) -> None:
    global _worker_encoder
    # One thread for each worker; the library's own would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder = Encoder(settings)


def _encode_in_worker(documents: List[Document]):
    return _worker_encoder.encode(documents)


def _write_all(encoded: Iterable, builders: dict, num_docs: int, log_interval: int) -> int:
    count, size, start = 0, 0, time.time()
    # File output, such as a log, gets a line now and then instead of a bar redrawn many times a second.
    interval = 0.5 if sys.stderr.isatty() else 10
    with tqdm(total=num_docs, unit=" docs", desc="tokenizing", mininterval=interval) as bar:
        for tokens, document_bytes in encoded:
            for key, builder in builders.items():
                builder.add_item(tokens[key])
                builder.end_document()
            count, size = count + 1, size + document_bytes
            bar.update()
            if count % log_interval == 0:
                bar.set_postfix_str(f"{size / (time.time() - start) / 2**20:.2f} MB/s", refresh=False)
        seconds = max(time.time() - start, 1e-9)
        bar.set_postfix_str(f"{size / seconds / 2**20:.2f} MB/s")
    return count


def _ftfy():
    try:
        import ftfy
    except ImportError as error:
        raise DataError("--ftfy needs the package ftfy; `pip install ftfy`, or leave the option out") from error
    return ftfy.fix_text


def get_args(input_args=None) -> argparse.Namespace:
    """Parse the command line (GPT-NeoX's options)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--input", required=True, help=".jsonl or .txt files (also .gz, .zst) or folders, separated by commas")
    add("--jsonl-keys", nargs="+", default=["text"], help="keys to tokenize, one data set for each (default: text)")
    add("--num-docs", type=int, help="number of documents, if known, for the progress bar")
    add("--tokenizer-type", required=True, choices=list(TOKENIZERS), help="as tokenizer_type in a config")
    add("--vocab-file", help="as vocab_file in a config")
    add("--merge-file", help="as merge_file in a config")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--ftfy", action="store_true", help="repair the text's encoding with the ftfy package")
    add("--output-prefix", required=True, help="path of the output without _KEY_document.bin and .idx")
    add("--dataset-impl", default="mmap", choices=["mmap"], help="format of the output; only mmap is read in training")
    add("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    add("--log-interval", type=int, default=100, help="documents between two updates of the MB/s shown (default: 100)")
    return parser.parse_args(input_args)


def main(input_args=None) -> None:
    """Run the command line."""
    args = get_args(input_args)
    files = find_input_files(args.input)
    settings = EncoderSettings(args.tokenizer_type, args.vocab_file, args.merge_file, args.append_eod, args.ftfy)
    documents = (document for path in files for document in read_documents(path, args.jsonl_keys))
    interval = max(args.log_interval, 1)
    count = preprocess(documents, settings, args.output_prefix, args.jsonl_keys, args.workers, args.num_docs, interval)
    for key in args.jsonl_keys:
        print(f"{count} documents in {args.output_prefix}_{key}_document.bin and .idx")


if __name__ == "__main__":
    try:
        main()
    except NeoXError as error:
        sys.exit(f"error: {error}")
