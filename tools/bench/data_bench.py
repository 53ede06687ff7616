"""preprocess_data beside the tokenizer alone, and what a training step waits for its data.

    python -m tools.bench.data_bench [--megabytes 4] [--out DIR]

The text is Python's own documentation and library, the tokenizer one of 4096 tokens trained on it. The peer with one
process is `encode` of the tokenizers library in a bare loop over the same texts, with two it is the library's own
`encode_batch` on two threads. The training step is that of configs/demo/qwen3-tiny-cpu.yml, a model so small that
waiting would show.
"""

import json
import os
import sys
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from tools.bench.report import Row, Target, bars, parser, report
from tools.bench.workers import Figures, Worker, interleaved, median, median_ratio

DEMO = "configs/demo/qwen3-tiny-cpu.yml"
LOADERS = (0, 2)
"""num_workers of the data loader."""
REPEATS = 5
_OWN = "tools.bench.data_bench"
_ON_CPU = {"DS_ACCELERATOR": "cpu"}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="data_bench_") as folder:
        prepare(folder, int(options.megabytes * 1e6))
        tokens = tokenizing(folder, options.repeats)
        waiting = loading(folder, options.repeats)
    rows = [*token_rows(tokens), *waiting_rows(waiting)]
    title = f"Data: {options.megabytes:g} MB of text"
    drawn = bars("tokens/s", "tokens/s")
    report(options.out, "data", title, rows, targets=targets(tokens, waiting), picture=drawn)
    return 0


def parse(arguments: Optional[Sequence[str]] = None):
    """The command line."""
    line = parser(__doc__, "data")
    line.add_argument("--megabytes", type=float, default=4.0, help="of text; default: %(default)s")
    line.add_argument("--repeats", type=int, default=REPEATS, help="of each measurement; default: %(default)s")
    return line.parse_args(arguments)


def prepare(folder: str, size: int) -> None:
    """Write corpus.jsonl, a tokenizer, and the data set that training reads."""
    from tools.datasets.corpora import Preparation, limit_bytes, prepare_dataset, pydocs

    with open(os.path.join(folder, "corpus.jsonl"), "w", encoding="utf-8") as file:
        for document in limit_bytes(pydocs(), size):
            file.write(json.dumps(document.texts) + "\n")
    prepare_dataset(Preparation(os.path.join(folder, "corpus.jsonl"), data_dir=folder))


def tokenizing(folder: str, repeats: int) -> Dict[str, List[Figures]]:
    """Figures of the four ways from text to tokens."""
    ways = {
        "tokenizer, 1 thread": ("bare", 1),
        "preprocess_data, 1 worker": ("preprocessing", 1),
        "tokenizer, 2 threads": ("bare", 2),
        "preprocess_data, 2 workers": ("preprocessing", 2),
    }
    workers: Dict[str, Worker] = {}
    try:
        for name, (target, processes) in ways.items():
            parallel = {"TOKENIZERS_PARALLELISM": str(processes > 1).lower(), "RAYON_NUM_THREADS": str(processes)}
            settings = {"folder": folder, "workers": processes, "name": f"{target}_{processes}"}
            workers[name] = Worker(f"{_OWN}:{target}", settings, parallel)
        return interleaved(workers, repeats)
    finally:
        for worker in workers.values():
            worker.close()


def bare(settings: Dict[str, Any]) -> Callable[[], Figures]:
    """A worker: the tokenizers library alone, over texts that are in memory already."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(_tokenizer(settings["folder"]))
    with open(os.path.join(settings["folder"], "corpus.jsonl"), encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]

    def step() -> Figures:
        if settings["workers"] == 1:
            return {"tokens": sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)}
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        return {"tokens": sum(len(each.ids) for each in encoded)}

    return step


def preprocessing(settings: Dict[str, Any]) -> Callable[[], Figures]:
    """A worker: preprocess_data's own way, from the .jsonl to .bin and .idx; its processes start anew in each step."""
    from tools.datasets.preprocess_data import EncoderSettings, preprocess
    from tools.datasets.text_files import read_documents

    encoder = EncoderSettings("HFTokenizer", _tokenizer(settings["folder"]))
    prefix = os.path.join(settings["folder"], settings["name"])

    def step() -> Figures:
        documents = read_documents(os.path.join(settings["folder"], "corpus.jsonl"))
        preprocess(documents, encoder, prefix, workers=settings["workers"])
        return {"tokens": _count(f"{prefix}_text_document")}

    return step


def _tokenizer(folder: str) -> str:
    return os.path.join(folder, "corpus", "tokenizer.json")


def _count(prefix: str) -> int:
    from megatron.data.indexed_dataset import make_dataset

    return int(make_dataset(prefix, "mmap", skip_warmup=True).sizes.sum())


def loading(folder: str, repeats: int) -> Dict[str, List[Figures]]:
    """Figures of training steps with every kind of loader."""
    workers: Dict[str, Worker] = {}
    try:
        for number in LOADERS:
            settings = {"folder": folder, "num_workers": number}
            workers[f"{number} loader processes"] = Worker(f"{_OWN}:training", settings, _ON_CPU)
        return interleaved(workers, 2 * repeats, warmup=2)
    finally:
        for worker in workers.values():
            worker.close()


def training(settings: Dict[str, Any]) -> Callable[[], Figures]:
    """A worker: a training step of the demo's model on the data set; says how long it waited for its batches."""
    from megatron.data import build_train_valid_test_data_iterators
    from megatron.initialize import initialize_megatron
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import setup_model_and_optimizer, train_step

    data = os.path.join(settings["folder"], "corpus")
    own = dict(data_path=os.path.join(data, "corpus_text_document"), vocab_file=_tokenizer(settings["folder"]))
    args = NeoXArgs.from_ymls([DEMO], overwrite_values={**own, "num_workers": settings["num_workers"]})
    args.build_tokenizer()
    initialize_megatron(args)
    engine = setup_model_and_optimizer(args)
    engine.train()
    batches = Waiting(build_train_valid_test_data_iterators(args)[0])

    def step() -> Figures:
        batches.seconds = 0.0
        tokens = args.train_batch_size * args.seq_length
        train_step(args, engine, batches)
        return {"waited": batches.seconds, "tokens": tokens}

    return step


class Waiting:
    """An iterator that counts the seconds for which it was waited for."""

    def __init__(self, batches: Iterator):
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> "Waiting":
        return self

    def __next__(self):
        start = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds += time.perf_counter() - start


def token_rows(figures: Dict[str, List[Figures]]) -> List[Row]:
    """Tokens/s of each way, and relative to the peer just before it."""
    names = list(figures)
    rows = []
    for number, name in enumerate(names):
        rate = figures[name][0]["tokens"] / median(figures[name])
        peer = figures[names[number - 1]] if number % 2 else None
        ratio = None if peer is None else median_ratio(peer, figures[name])
        rows.append({"work": name, "tokens/s": rate, "seconds": median(figures[name]), "of the tokenizer": ratio})
    return rows


def waiting_rows(figures: Dict[str, List[Figures]]) -> List[Row]:
    """The share of a step that goes by waiting for its batch."""
    return [
        {"work": f"training step, {name}", "seconds": median(steps), "waiting, share": share(steps)}
        for name, steps in figures.items()
    ]


def share(steps: List[Figures]) -> float:
    """Of the steps' time, what was waiting."""
    return sum(each["waited"] for each in steps) / sum(each["seconds"] for each in steps)


def targets(tokens: Dict[str, List[Figures]], waiting: Dict[str, List[Figures]]) -> List[Target]:
    """What is wanted of the data path."""
    one, two = (row["of the tokenizer"] for row in token_rows(tokens) if row["of the tokenizer"] is not None)
    return [
        Target("preprocess_data / tokenizer, 1 process", 0.9, one, most=False),
        Target("preprocess_data / tokenizer, 2 processes", 0.9, two, most=False),
        *(Target(f"waiting for data / step, {name}", 0.01, share(steps)) for name, steps in waiting.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
