"""What the model reads and what it is asked for."""

from types import SimpleNamespace

import torch

from megatron.training.batch import get_batch

TEXT = torch.tensor([[5, 6, 0, 7, 8], [1, 0, 0, 2, 3]])


def arguments(eod_mask_loss=False):
    return SimpleNamespace(eod_mask_loss=eod_mask_loss, tokenizer=SimpleNamespace(eod=0))


def test_tokens_labels_positions():
    (tokens, positions), (labels, mask) = get_batch(arguments(), {"text": TEXT})
    assert tokens.tolist() == [[5, 6, 0, 7], [1, 0, 0, 2]]
    assert labels.tolist() == [[6, 0, 7, 8], [0, 0, 2, 3]]
    assert positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert mask.tolist() == [[1.0] * 4] * 2
    assert tokens.dtype == positions.dtype == labels.dtype == torch.int64 and mask.dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in (tokens, positions, labels, mask))


def test_eod_mask_loss_masks_where_eod_is_read():
    _, (_, mask) = get_batch(arguments(eod_mask_loss=True), {"text": TEXT})
    assert mask.tolist() == [[1, 1, 0, 1], [1, 0, 0, 1]]


def test_label_data():
    label = torch.tensor([[9, -100, 0, -100, 8], [-100, 4, -100, -100, 3]])
    (tokens, _), (labels, mask) = get_batch(arguments(), {"text": TEXT, "label": label})
    assert tokens.tolist() == TEXT[:, :-1].tolist()
    assert mask.tolist() == [[0, 1, 0, 1], [1, 0, 0, 1]]
    assert labels[mask.bool()].tolist() == [0, 8, 4, 3]
    assert labels.min() >= 0  # indices into the vocabulary, masked or not
    _, (_, both) = get_batch(arguments(eod_mask_loss=True), {"text": TEXT, "label": label})
    assert both.tolist() == [[0, 1, 0, 1], [1, 0, 0, 1]]


def test_label_none_is_no_label():
    assert get_batch(arguments(), {"text": TEXT, "label": None})[1][1].min() == 1.0
