"""Windows over a text counted by hand; loss, perplexity and bits per byte against transformers' logits."""

import math

import pytest
import torch

from megatron.errors import ConfigError, DataError
from megatron.evaluation.perplexity import file_perplexity, read_text, text_perplexity
from megatron.evaluation.run import perplexity_line
from megatron.evaluation.text import rolling_windows
from tests.helpers.evaluation import CONTEXT, EOD, TEXT, hf_tokenizer, hf_twin, twin_args, twin_runner
from tests.helpers.tolerances import LOSS


def test_windows_by_hand():
    """The harness documents its own rule with these numbers."""
    windows = rolling_windows(range(10), 99, length=4)
    assert windows == [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    assert rolling_windows(range(7), 99, length=4, stride=2) == [
        *[([99], [0, 1, 2, 3]), ([1, 2, 3], [4, 5]), ([2, 3, 4, 5], [6])]
    ]
    assert rolling_windows([7], 99, length=4, stride=1) == [([99], [7])]
    assert rolling_windows([], 99, length=4) == []


@pytest.mark.parametrize("count, length, stride", [(1, 1, 1), (50, 7, 3), (49, 7, 7), (50, 8, 1), (30, 31, 5)])
def test_every_token_is_scored_once_after_its_own_text(count, length, stride):
    tokens, scored = list(range(100, 100 + count)), []
    for number, (context, continuation) in enumerate(rolling_windows(tokens, 5, length, stride)):
        fed = [*context, *continuation][:-1]
        assert len(fed) <= length
        end = len(scored) + len(continuation)
        assert fed == [5, *tokens][end - len(fed) : end]
        assert len(context) >= (1 if number == 0 else min(length - stride, len(scored)) + 1)
        scored += continuation
    assert scored == tokens


@pytest.mark.parametrize("stride", [0, -1, 5])
def test_a_stride_beyond_the_context(stride):
    with pytest.raises(ConfigError, match=f"perplexity_stride={stride} must be from 1 to the context length, 4"):
        rolling_windows(range(10), 99, length=4, stride=stride)


@pytest.fixture(scope="module")
def hf():
    return hf_twin()


@pytest.fixture(scope="module")
def runner(hf):
    return twin_runner(twin_args(), hf)


def expected_nats(hf, tokens, stride):
    """Each window's own forward pass with labels, -100 where a token has been scored before: transformers' recipe."""
    fed, done, total = torch.tensor([EOD, *tokens]), 0, 0.0
    while done < len(tokens):
        end = min(done + (stride if done else CONTEXT), len(tokens))
        window = fed[max(0, end - CONTEXT) : end + 1]
        labels = window.clone()
        labels[: -(end - done)] = -100
        with torch.no_grad():
            total += hf(window[None], labels=labels[None]).loss.item() * (end - done)
        done = end
    return total


@pytest.mark.parametrize("stride", [None, CONTEXT, 11])
@pytest.mark.parametrize("size", [60, len(TEXT)])
def test_a_text_is_as_for_transformers(hf, runner, stride, size, tmp_path):
    args, text = twin_args(), TEXT[:size]
    (tmp_path / "text.txt").write_bytes(text.encode())
    tokens = hf_tokenizer()(text)["input_ids"]
    nats = expected_nats(hf, tokens, stride or CONTEXT)
    found = file_perplexity(args, runner, str(tmp_path / "text.txt"), stride, batch_size=3)
    assert found["loss"] == pytest.approx(nats / len(tokens), abs=LOSS)
    assert found["perplexity"] == pytest.approx(math.exp(nats / len(tokens)), rel=LOSS)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), abs=LOSS)
    assert (found["tokens"], found["bytes"], found["stride"]) == (len(tokens), len(text.encode()), stride or CONTEXT)
    assert (found["windows"] == 1) == (len(tokens) <= CONTEXT)


def test_bits_of_the_uniform_distribution():
    """log2(vocabulary) bits for each token, whatever the windows."""

    def scores(windows):
        return [(-len(continuation) * math.log(300), False) for _, continuation in windows]

    args = twin_args()
    found = text_perplexity(args, TEXT, scores, stride=5)
    assert found["perplexity"] == pytest.approx(300)
    assert found["bits_per_byte"] == pytest.approx(found["tokens"] * math.log2(300) / len(TEXT.encode()))
    line = perplexity_line({"file": "a.txt", **found})
    assert line.startswith("a.txt: loss 5.7038 nats per token | perplexity 300 | ")


def test_texts_that_cannot_be_read(tmp_path):
    for content, problem in ((b"\xff\xfe", "not UTF-8 text"), (b"", "is empty; name a file with text")):
        path = tmp_path / "text"
        path.write_bytes(content)
        with pytest.raises(DataError, match=problem):
            read_text(str(path))
    with pytest.raises(DataError, match="perplexity_file=.*none: No such file or directory; name a text file"):
        read_text(str(tmp_path / "none"))
    (tmp_path / "text").write_bytes(b"a\r\n")
    assert read_text(str(tmp_path / "text")) == "a\r\n"
