"""Samples of seq_length + 1 tokens cut from an indexed data set."""

from typing import Dict, Optional

import numpy as np

from megatron.data.index_maps import SampleRequest, load_or_build
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import DataError

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss."""
PADDING = 0
"""Token after the end of a sample that is not packed full; its label is IGNORED_LABEL."""


class GPT2Dataset:
    """Item i is {"text": int64 [seq_length + 1]}, and "label" of the same shape if there are labels or padding.

    pack_impl `packed` cuts one shuffled stream of documents every seq_length tokens, so that a sample's last token is
    the next one's first. `pack_until_overflow` and `unpacked` keep documents whole; what is missing to a full sample
    is padded and labelled as ignored.
    """

    def __init__(
        self,
        name: str,
        data_prefix: str,
        documents: np.ndarray,
        indexed_dataset: MMapIndexedDataset,
        num_samples: Optional[int],
        num_epochs: Optional[int],
        seq_length: int,
        seed: int,
        pack_impl: str = "packed",
        allow_chopped: bool = True,
        use_shared_fs: bool = True,
        label_dataset: Optional[MMapIndexedDataset] = None,
        vocab_limit: Optional[int] = None,
    ):
        """documents: numbers of the sequences to use, ascending. vocab_limit: tokens must be below it.

        Every process must construct it. Raises DataError for labels that do not match, floating-point items, or a
        split too small for one sample.
        """
        _check_items(indexed_dataset, label_dataset)
        self.name = name
        self.indexed_dataset = indexed_dataset
        self.label_dataset = label_dataset
        self.seq_length = seq_length
        self.vocab_limit = vocab_limit
        self.packed = pack_impl == "packed"
        request = SampleRequest(
            name,
            data_prefix,
            np.asarray(documents, dtype=np.int32),
            indexed_dataset.sizes,
            num_samples,
            num_epochs,
            seq_length,
            seed,
            pack_impl,
            allow_chopped,
            label_dataset,
        )
        self.maps = load_or_build(request, use_shared_fs)

    def __len__(self) -> int:
        return len(self.maps)

    def __getitem__(self, index: int) -> Dict[str, np.ndarray]:
        sample = self.maps.shuffle_idx[index]
        text = self._read(self.indexed_dataset, sample)
        self._check_vocabulary(text)
        item = {"text": self._fill(text, PADDING)}
        if self.label_dataset is not None:
            item["label"] = self._fill(self._read(self.label_dataset, sample), IGNORED_LABEL)
        elif not self.packed:
            item["label"] = self._fill(text, IGNORED_LABEL)
        return item

    def _read(self, dataset: MMapIndexedDataset, sample: int) -> np.ndarray:
        """The tokens of one sample, int64, seq_length + 1 at most."""
        first, offset = (int(number) for number in self.maps.sample_idx[sample])
        last, end = (int(number) for number in self.maps.sample_idx[sample + 1])
        documents = self.maps.doc_idx
        if not self.packed:
            pieces = [dataset.get(documents[position]) for position in range(first, last)]
        elif first == last:
            pieces = [dataset.get(documents[first], offset, end - offset + 1)]
        else:
            pieces = [dataset.get(documents[first], offset)]
            pieces += [dataset.get(documents[position]) for position in range(first + 1, last)]
            pieces.append(dataset.get(documents[last], 0, end + 1))
        return np.concatenate(pieces)[: self.seq_length + 1].astype(np.int64)

    def _fill(self, tokens: np.ndarray, value: int) -> np.ndarray:
        return np.pad(tokens, (0, self.seq_length + 1 - len(tokens)), constant_values=value)

    def _check_vocabulary(self, text: np.ndarray) -> None:
        """A token outside the embedding would be an index error on one rank and a zero vector on several."""
        if self.vocab_limit is not None and int(text.max()) >= self.vocab_limit:
            raise DataError(
                f"data set {self.indexed_dataset.prefix} has token {int(text.max())}, and the vocabulary ends at "
                f"{self.vocab_limit - 1}: the data was made with another tokenizer than tokenizer_type and vocab_file"
            )


def _check_items(text: MMapIndexedDataset, label: Optional[MMapIndexedDataset]) -> None:
    for dataset in (text, label):
        if dataset is not None and dataset.dtype.kind not in "iu":
            raise DataError(f"data set {dataset.prefix} holds {dataset.dtype} items; tokens and labels are integers")
    if label is not None and not np.array_equal(text.sizes, label.sizes):
        raise DataError(
            f"label data {label.prefix} does not match {text.prefix}: documents must have the same number and lengths"
        )
