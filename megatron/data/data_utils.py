"""From the data settings of a config to the batches of one rank."""

from dataclasses import dataclass
from typing import Dict, Iterator, Optional, Tuple

import numpy as np
import torch

from megatron import mpu
from megatron.data.blendable_dataset import BlendableDataset
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset import make_dataset
from megatron.data.samplers import DistributedBatchSampler
from megatron.data.splits import (
    get_normalized_weights_and_num_samples,
    get_train_valid_test_split_,
    num_evaluation_iterations,
    weights_by_num_docs,
)
from megatron.data.sync import print_rank_0
from megatron.errors import ConfigError, DataError

Batches = Optional[Iterator[Dict[str, torch.Tensor]]]


def build_train_valid_test_data_iterators(neox_args) -> Tuple[Batches, Batches, Batches]:
    """Endless iterators over this rank's micro-batches for training, validation and testing.

    Each yields {"text": int64 [micro_batch, seq_length + 1]}, and "label" of the same shape (-100: ignored) when there
    are labels or padding. One is None when its split is empty or not wanted. Sets do_train, do_valid, do_test, and
    train_iters where train_epochs stands for it. Begins where a run of neox_args.iteration steps stopped; one
    evaluation is taken to read eval_iters * gradient_accumulation_steps micro-batches.

    Every rank must call it. Raises DataError for missing, damaged, foreign or too little data, ConfigError for settings
    that do not fit each other.
    """
    train, valid, test = build_train_valid_test_datasets(neox_args)
    set_do_flags(neox_args, train, valid, test)
    steps = neox_args.iteration or 0
    micro_batches = neox_args.gradient_accumulation_steps
    evaluations = steps // neox_args.eval_interval
    return (
        _batches(neox_args, train, "train", steps * micro_batches) if neox_args.do_train else None,
        _batches(neox_args, valid, "valid", evaluations * neox_args.eval_iters * micro_batches)
        if neox_args.do_valid
        else None,
        _batches(neox_args, test, "test", 0) if neox_args.do_test else None,
    )


def set_train_iters(neox_args) -> None:
    """Set train_iters from train_epochs, if that is how the length of the run is given.

    One epoch is every whole micro-batch of the training data; several epochs repeat it in the same order. Learning-rate
    schedules need train_iters, so call this before the optimizer is built. Every rank must call it.
    Raises ConfigError if both or neither are set, or for settings that train_epochs excludes.
    """
    if neox_args.train_epochs is None:
        if neox_args.train_iters is None:
            raise ConfigError("train_iters and train_epochs are both unset; set one of them")
        return
    if neox_args.train_iters is not None:
        return  # set here before, or given as well: NeoXArgs refuses that
    _check_epochs(neox_args)
    train, _, _ = _datasets(neox_args, [_Need(None, 1), None, None])
    if train is None:
        raise _nothing_to_train_on(neox_args)
    micro_batches = _require_one_batch(neox_args, train, "train") * neox_args.train_epochs
    neox_args.train_iters = micro_batches // neox_args.gradient_accumulation_steps
    print_rank_0(f"> train_epochs={neox_args.train_epochs} is train_iters={neox_args.train_iters}")


def build_train_valid_test_datasets(neox_args):
    """The three data sets, each large enough for the whole run; None where the split has no documents.

    Every rank must call it. Raises as build_train_valid_test_data_iterators does.
    """
    set_train_iters(neox_args)
    batch = neox_args.train_batch_size
    valid = num_evaluation_iterations(neox_args.train_iters, neox_args.eval_interval, neox_args.eval_iters)
    train = _Need(None, 1) if neox_args.train_epochs else _Need(neox_args.train_iters * batch, None)
    return _datasets(neox_args, [train, _Need(valid * batch, None), _Need(neox_args.eval_iters * batch, None)])


def set_do_flags(neox_args, train, valid, test) -> None:
    """Set do_train, do_valid and do_test: there is data, and it is asked for.

    Raises DataError if training is asked for and there is nothing to train on.
    """
    if train is None and neox_args.train_iters > 0:
        raise _nothing_to_train_on(neox_args)
    neox_args.do_train = train is not None and neox_args.train_iters > 0
    neox_args.do_valid = valid is not None and neox_args.eval_iters > 0
    neox_args.do_test = test is not None and neox_args.eval_iters > 0


@dataclass(frozen=True)
class _Need:
    """How much a data set must give: a number of samples, or whole passes over the documents."""

    samples: Optional[int]
    epochs: Optional[int]


def _nothing_to_train_on(neox_args) -> DataError:
    return DataError(
        f"split={neox_args.split!r} leaves no document of data_path={neox_args.data_path} for training; give its first "
        "part more, or use data with more documents"
    )


def _check_epochs(neox_args) -> None:
    problems = []
    if neox_args.pack_impl != "packed":
        problems.append(f"train_epochs needs pack_impl=packed, not {neox_args.pack_impl}; or set train_iters")
    if neox_args.weight_by_num_documents:
        problems.append("train_epochs excludes weight_by_num_documents; or set train_iters")
    if any(weight != 1.0 for weight in neox_args.train_data_weights or []):
        problems.append(f"train_epochs excludes train_data_weights={neox_args.train_data_weights}; or set train_iters")
    if problems:
        raise ConfigError(problems)


def _datasets(neox_args, needs) -> list:
    """Train, valid and test data sets for three _Needs; None where the need is None."""
    if neox_args.train_data_paths:
        return [
            _blend(neox_args, split, need) if need else None
            for split, need in zip(("train", "valid", "test"), needs, strict=True)
        ]
    if not neox_args.data_path:
        raise ConfigError(
            "data_path is unset, and so are train_data_paths: set one; "
            "`python prepare_data.py pydocs -d data` makes a small data set"
        )
    return _split(neox_args, needs)


def _split(neox_args, needs) -> list:
    """One data set, its documents shared out by `split`."""
    indexed = _open(neox_args, neox_args.data_path)
    bounds = get_train_valid_test_split_(neox_args.split, len(indexed))
    datasets = []
    for number, (name, need) in enumerate(zip(("train", "valid", "test"), needs, strict=True)):
        documents = np.arange(bounds[number], bounds[number + 1], dtype=np.int32)
        wanted = need is not None and len(documents) > 0
        datasets.append(_dataset(neox_args, name, indexed, documents, need) if wanted else None)
    return datasets


def _blend(neox_args, split: str, need: _Need):
    """Data sets of one split's own paths, blended by weight."""
    paths = getattr(neox_args, f"{split}_data_paths")
    if not paths:
        return None
    labels = _same_length(neox_args, f"{split}_label_data_paths", split) or [None] * len(paths)
    indexed = [_open(neox_args, path) for path in paths]
    if neox_args.weight_by_num_documents:
        weights = weights_by_num_docs([len(dataset) for dataset in indexed], neox_args.weighted_sampler_alpha)
    else:
        weights = _same_length(neox_args, f"{split}_data_weights", split) or [1.0] * len(paths)
    weights, samples = get_normalized_weights_and_num_samples(weights, need.samples)
    datasets = []
    for number, dataset in enumerate(indexed):
        documents = np.arange(len(dataset), dtype=np.int32)
        share = _Need(samples[number], need.epochs)
        label = _open(neox_args, labels[number]) if labels[number] else None
        datasets.append(_dataset(neox_args, f"{split}_{number}", dataset, documents, share, label))
    if len(datasets) == 1:
        return datasets[0]
    # Whole epochs of each: weights by length make all of them end together.
    shares = weights if need.epochs is None else [len(dataset) for dataset in datasets]
    return BlendableDataset(datasets, shares, need.samples)


def _same_length(neox_args, setting: str, split: str) -> Optional[list]:
    """A list that goes with the split's paths, or None if unset."""
    values, paths = getattr(neox_args, setting), getattr(neox_args, f"{split}_data_paths")
    if values and len(values) != len(paths):
        raise ConfigError(f"{setting} has {len(values)} entries and {split}_data_paths {len(paths)}; give one for each")
    return values


def _open(neox_args, path: str):
    return make_dataset(path, neox_args.data_impl, skip_warmup=not neox_args.mmap_warmup)


def _dataset(neox_args, name, indexed, documents, need: _Need, label=None) -> GPT2Dataset:
    return GPT2Dataset(
        name,
        indexed.prefix,
        documents,
        indexed,
        need.samples,
        need.epochs,
        neox_args.seq_length,
        neox_args.seed,
        pack_impl=neox_args.pack_impl,
        allow_chopped=neox_args.allow_chopped,
        use_shared_fs=neox_args.use_shared_fs,
        label_dataset=label,
        vocab_limit=neox_args.padded_vocab_size,
    )


def _sampler(neox_args, dataset) -> DistributedBatchSampler:
    return DistributedBatchSampler(
        len(dataset), neox_args.batch_size, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    )


def _require_one_batch(neox_args, dataset, name: str) -> int:
    """Micro-batches in one pass over a data set. Raises DataError if there is none."""
    sampler = _sampler(neox_args, dataset)
    if len(sampler) == 0:
        raise DataError(
            f"the {name} data has {len(dataset)} samples of seq_length={neox_args.seq_length}, fewer than one "
            f"micro-batch: train_micro_batch_size_per_gpu={neox_args.batch_size} on {sampler.world_size} data-parallel "
            "ranks; use more data, a shorter seq_length or a smaller batch"
        )
    return len(sampler)


def _batches(neox_args, dataset, name: str, start: int) -> Iterator[Dict[str, torch.Tensor]]:
    """Micro-batches number `start`, start + 1, ... of an endless repetition of the data set."""
    passes = _require_one_batch(neox_args, dataset, name)
    return _endless(dataset, _sampler(neox_args, dataset), start % passes, neox_args.num_workers)


def _endless(dataset, sampler: DistributedBatchSampler, start: int, num_workers: int):
    """Workers start at the first batch, so ranks that read nothing (inner pipeline stages) have none.

    The loader gets its own random generator: it draws a seed for its workers, and must not move dropout's.
    """
    sampler.start = start
    while True:
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),
        )
        try:
            yield from loader
        except DataError as error:
            raise _without_traceback(error) from None
        sampler.start = 0


def _without_traceback(error: DataError) -> DataError:
    """A worker process hands its error over as the text of a traceback, which ends with the error's own message."""
    return DataError(str(error).rpartition(f"{DataError.__module__}.{DataError.__qualname__}: ")[2].strip())
