"""Each tokenizer_type: against the library it comes from, there and back, and its errors."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import TOKENIZERS, build_tokenizer
from megatron.tokenizer.train_tokenizer import train_tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/golden/data_index/tiny_tokenizer.json"
TEXTS = [
    "",
    "The quick brown fox",
    "  two  spaces\n\ttabs\n",
    "Zürich, 東京 and 🙂",
    "x=f'{y}'  # comment",
    "\0\1 bytes",
]


def tokenizer_of(tokenizer_type, vocab_file=None, merge_file=None):
    vocab_file, merge_file = (None if path is None else str(path) for path in (vocab_file, merge_file))
    return build_tokenizer(SimpleNamespace(tokenizer_type=tokenizer_type, vocab_file=vocab_file, merge_file=merge_file))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    source = Path(__file__).read_text()
    assert train_tokenizer([source, source], str(path), vocab_size=400) == 400
    return path


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory):
    """The tiny tokenizer's BPE as a vocab.json and a merges.txt."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = json.loads(TINY.read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return folder


@pytest.fixture(scope="module")
def sentencepiece_models(tmp_path_factory):
    spm = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    sentences = [line for line in Path(__file__).read_text().splitlines() if line.strip()]
    for name, symbols in (("with", ["<|endoftext|>"]), ("without", [])):
        model = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=600,
            hard_vocab_limit=False,
            user_defined_symbols=symbols,
            byte_fallback=True,
            minloglevel=2,
        )
        (folder / f"{name}.model").write_bytes(model.getvalue())
    return folder


def test_trained_tokenizer_gives_every_text_back(trained):
    tokenizer = tokenizer_of("HFTokenizer", trained)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (400, 0, 1)
    for text in TEXTS:
        tokens = tokenizer.tokenize(text)
        assert tokenizer.detokenize(tokens) == text
        assert all(type(token) is int and 0 <= token < 400 for token in tokens)
    assert tokenizer.tokenize_batch(TEXTS) == [tokenizer.tokenize(text) for text in TEXTS]
    assert len(tokenizer.tokenize(TEXTS[1])) < len(TEXTS[1])
    assert tokenizer.inv_vocab[tokenizer.vocab["<|padding|>"]] == "<|padding|>"


def test_training_is_repeatable(trained, tmp_path):
    again = tmp_path / "tokenizer.json"
    source = Path(__file__).read_text()
    train_tokenizer(iter([source, source]), str(again), vocab_size=400)
    assert again.read_bytes() == trained.read_bytes()


def test_training_refuses_what_cannot_work(tmp_path):
    path = str(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="no text"):
        train_tokenizer([], path, vocab_size=300)
    with pytest.raises(ConfigError, match="at least 258"):
        train_tokenizer(["a"], path, vocab_size=257)
    with pytest.raises(ConfigError, match="BPE"):
        train_tokenizer(["a"], path, tokenizer_type="WordPiece")
    assert list(tmp_path.iterdir()) == []


def test_hf_tokenizer_is_the_library_s(trained):
    from tokenizers import Tokenizer

    for path in (TINY, trained):
        library, ours = Tokenizer.from_file(str(path)), tokenizer_of("hftokenizer", path)
        for text in TEXTS + ["a<|endoftext|>b"]:
            assert ours.tokenize(text) == library.encode(text).ids
    tokenizer = tokenizer_of("HFTokenizer", TINY)
    assert tokenizer.detokenize([*tokenizer.tokenize("a b"), tokenizer.eod]) == "a b"  # special tokens are not text


@pytest.mark.parametrize("token, number", [("</s>", 2), ("<eos>", 2), ("<|end_of_text|>", 2)])
def test_hf_tokenizer_of_other_families(token, number, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "<unk>": 1, token: number, "z": 9}, unk_token="<unk>")).save(
        str(tmp_path / "t")
    )
    tokenizer = tokenizer_of("HFTokenizer", tmp_path / "t")
    assert tokenizer.eod == number and tokenizer.pad is None
    assert tokenizer.vocab_size == 10  # rows 3 to 8 are unused, but 9 needs a row


def test_hf_tokenizer_without_an_end_says_so_when_asked(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(str(tmp_path / "t"))
    tokenizer = tokenizer_of("HFTokenizer", tmp_path / "t")
    assert tokenizer.tokenize("a") == [0]
    with pytest.raises(DataError, match="end-of-document"):
        tokenizer.eod  # noqa: B018


def test_the_end_token_of_a_chat_model_is_a_setting(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {"a": 0, "<|endoftext|>": 1, "<|im_end|>": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "t"))
    args = SimpleNamespace(tokenizer_type="HFTokenizer", vocab_file=str(tmp_path / "t"), eod_token=None)
    assert build_tokenizer(args).eod == 1
    args.eod_token = "<|im_end|>"
    assert build_tokenizer(args).eod == 2
    args.eod_token = "<eot>"
    with pytest.raises(DataError, match="eod_token='<eot>'"):
        build_tokenizer(args)


def test_gpt2_bpe_is_transformers_gpt2(gpt2_files):
    transformers = pytest.importorskip("transformers")
    reference = transformers.GPT2TokenizerFast.from_pretrained(str(gpt2_files))
    tokenizer = tokenizer_of("GPT2BPETokenizer", gpt2_files / "vocab.json", gpt2_files / "merges.txt")
    for text in TEXTS + ["a<|endoftext|>b", " leading"]:
        assert tokenizer.tokenize(text) == reference.encode(text)
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert (tokenizer.vocab_size, tokenizer.eod) == (300, 0)


def test_hf_gpt2(gpt2_files):
    pytest.importorskip("transformers")
    tokenizer = tokenizer_of("HFGPT2Tokenizer", gpt2_files)
    plain = tokenizer_of("GPT2BPETokenizer", gpt2_files / "vocab.json", gpt2_files / "merges.txt")
    for text in TEXTS:
        assert tokenizer.tokenize(text) == plain.tokenize(text)
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (300, 0, 1)
    assert tokenizer.vocab["<|padding|>"] == 1


def test_sentencepiece(sentencepiece_models):
    tokenizer = tokenizer_of("SPMTokenizer", sentencepiece_models / "with.model")
    assert tokenizer.inv_vocab[tokenizer.eod] == "<|endoftext|>"
    assert tokenizer.tokenize_batch(["a b"]) == [tokenizer.tokenize("a b")]
    assert tokenizer.detokenize(tokenizer.tokenize("The quick brown 東京")) == "The quick brown 東京"
    assert max(tokenizer.tokenize("The quick brown fox")) < tokenizer.vocab_size == len(tokenizer.vocab)
    assert tokenizer.pad is None
    other = tokenizer_of("SPMTokenizer", sentencepiece_models / "without.model")
    assert other.inv_vocab[other.eod] == "</s>"  # not the unknown token, which the library gives for an absent piece


def test_characters():
    tokenizer = tokenizer_of("CharLevelTokenizer")
    assert tokenizer.tokenize("aé\n") == [97, 195, 169, 10]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (512, 0, 1)
    for text in TEXTS[:-1]:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.detokenize([0, 97, 1, 300, 195]) == "a\ufffd"  # half a character
    assert tokenizer.vocab["a"] == 97


def test_tiktoken(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257}
    encoding = tiktoken.Encoding(
        "toy", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    tokenizer = tokenizer_of("TiktokenTokenizer", "gpt2")
    assert tokenizer.tokenize("the th") == [257, 32, 256]
    assert (tokenizer.vocab_size, tokenizer.eod) == (259, 258)
    for text in TEXTS + ["<|endoftext|> in a text is text"]:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
        assert tokenizer.eod not in tokenizer.tokenize(text)
    assert tokenizer.vocab["the"] == 257
    with pytest.raises(DataError, match="cl100k_base"):
        tokenizer_of("TiktokenTokenizer", "no_such_encoding")


def test_tiktoken_without_a_network(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def refuse(name):
        raise ConnectionError

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(DataError, match="TIKTOKEN_CACHE_DIR"):
        tokenizer_of("TiktokenTokenizer", "gpt2")


@pytest.mark.parametrize("tokenizer_type", [name for name in TOKENIZERS if name not in ("CharLevelTokenizer",)])
def test_missing_settings_and_files_are_named(tokenizer_type, tmp_path):
    if tokenizer_type != "HFGPT2Tokenizer":  # without a file it is "gpt2", from the hub
        with pytest.raises(ConfigError, match="vocab_file is unset"):
            tokenizer_of(tokenizer_type)
    if tokenizer_type != "TiktokenTokenizer":
        with pytest.raises(DataError, match="vocab_file=/nowhere"):
            tokenizer_of(tokenizer_type, "/nowhere/vocab", "/nowhere/merges")
        (tmp_path / "junk").write_bytes(b"\xff\xfe junk")
        with pytest.raises(DataError, match="vocab_file="):
            tokenizer_of(tokenizer_type, tmp_path / "junk", tmp_path / "junk")


def test_gpt2_needs_its_own_vocabulary(gpt2_files, tmp_path):
    with pytest.raises(ConfigError, match="merge_file is unset"):
        tokenizer_of("GPT2BPETokenizer", gpt2_files / "vocab.json")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match="endoftext"):
        tokenizer_of("GPT2BPETokenizer", tmp_path / "vocab.json", tmp_path / "merges.txt")


def test_unknown_type_is_named():
    with pytest.raises(ConfigError, match="tokenizer_type=WordPiece.*HFTokenizer"):
        tokenizer_of("WordPiece")


@pytest.mark.parametrize(
    "library, tokenizer_type",
    [("sentencepiece", "SPMTokenizer"), ("tiktoken", "TiktokenTokenizer"), ("transformers", "HFGPT2Tokenizer")],
)
def test_a_missing_library_names_the_requirements_file(library, tokenizer_type, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=rf"{library}.*pip install -r (\S+)") as raised:
        tokenizer_of(tokenizer_type, TINY)
    assert (ROOT / str(raised.value).split("pip install -r ")[1].strip("`")).is_file()
