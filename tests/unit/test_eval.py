"""Log-probabilities and completions against transformers' logits; requests, results and ranks of eval.py.

None of it needs lm-evaluation-harness: see test_eval_adapter.py for that.
"""

import json

import pytest
import torch

from megatron.errors import ConfigError, DataError, NeoXError
from megatron.evaluation import Completion, complete, score
from megatron.evaluation.completion import cut
from megatron.evaluation.run import Evaluation, scalars_of, write_results
from megatron.evaluation.scoring import _positions_at_a_time
from megatron.evaluation.text import encode, first_context
from megatron.neox_arguments.command_line import parse_deepy
from megatron.text_generation import SamplingSettings
from tests.helpers.evaluation import CONTEXT, TEXT, VOCAB, greedy, hf_tokenizer, hf_twin, twin_args, twin_runner

TOLERANCE = 2e-4
"""Sums of tens of log-probabilities of order 5, each within 2e-5."""


@pytest.fixture(scope="module")
def hf():
    return hf_twin()


@pytest.fixture(scope="module")
def args():
    return twin_args()


@pytest.fixture(scope="module")
def runner(args, hf):
    return twin_runner(args, hf)


def expected_score(hf, context, continuation):
    """From the logits of transformers' model over its own vocabulary, one pair at a time."""
    tokens = [*context, *continuation][-(CONTEXT + 1) :]
    with torch.no_grad():
        logits = hf(torch.tensor([tokens[:-1]])).logits[0, -len(continuation) :].double()
    targets = torch.tensor(list(continuation))
    total = logits.log_softmax(-1).gather(1, targets[:, None]).sum().item()
    return total, bool((logits.argmax(-1) == targets).all())


def pairs_of(hf):
    """Short, long, beyond the context, a whole context of continuation, and a greedy one."""
    generator = torch.Generator().manual_seed(3)

    def some(count):
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    pairs = [(some(a), some(b)) for a, b in [(3, 4), (20, 1), (1, 1), (9, 30), (90, 6), (5, CONTEXT), (40, 9)]]
    context = some(5)
    with torch.no_grad():
        likeliest = hf(torch.tensor([context])).logits[0, -1].argmax().item()
        second = hf(torch.tensor([[*context, likeliest]])).logits[0, -1].argmax().item()
    return [*pairs, (context, [likeliest, second]), (context, [likeliest, (second + 1) % VOCAB])]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_are_those_of_transformers(args, runner, hf, batch_size):
    pairs, done = pairs_of(hf), []
    scores = score(args, runner, pairs, batch_size, done.append)
    assert [is_greedy for _, is_greedy in scores] == [False] * 7 + [True, False]
    for (total, is_greedy), (context, continuation) in zip(scores, pairs, strict=True):
        expected, expected_greedy = expected_score(hf, context, continuation)
        assert total == pytest.approx(expected, abs=TOLERANCE) and is_greedy == expected_greedy
    assert sum(done) == len(pairs)


def test_pieces_of_the_output_layer_do_not_change_scores(args, runner, hf, monkeypatch):
    pairs = pairs_of(hf)
    whole = score(args, runner, pairs, 3)
    monkeypatch.setattr("megatron.evaluation.scoring._LOGITS_AT_A_TIME", 384 * 5 + 1)
    assert _positions_at_a_time(args) == 5
    for found, expected in zip(score(args, runner, pairs, 3), whole, strict=True):
        assert found == (pytest.approx(expected[0], abs=1e-5), expected[1])


def test_what_cannot_be_scored(args, runner):
    for pair in (([], [1]), ([1], [])):
        with pytest.raises(DataError, match="at least one token"):
            score(args, runner, [pair])
    with pytest.raises(DataError, match="49 tokens is longer than the context, seq_length=48"):
        score(args, runner, [([1], [1] * 49)])
    broken = twin_runner(args, hf_twin())
    with torch.no_grad():
        broken.layers[0][1].word_embeddings.weight.fill_(float("nan"))
    with pytest.raises(NeoXError, match="not finite"):
        score(args, broken, [([1], [2])])
    assert score(args, runner, []) == []


PROMPTS = ["The court", "A", "of the village met on the first day of March. Nobody knew why", TEXT, "\n\n"]


def completions(args, until=(), maximum=9, **sampling):
    settings = SamplingSettings(**sampling)
    return [Completion(tuple(args.tokenizer.tokenize(p)), tuple(until), maximum, settings) for p in PROMPTS]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_completions_are_the_likeliest_tokens_of_transformers(args, runner, hf, batch_size):
    """Also where the context is cut on the left, and beside longer ones in a batch."""
    texts = complete(args, runner, completions(args), batch_size)
    assert texts == [greedy(hf, prompt, 9) for prompt in PROMPTS]
    assert len(set(texts)) == len(texts) and all(texts)


def test_completions_end_before_the_strings_that_end_them(args, runner, hf, monkeypatch):
    free = [greedy(hf, prompt, 20) for prompt in PROMPTS]
    ends = [text[5:7] for text in free]  # often inside a token, or over two
    steps = []
    monkeypatch.setattr(type(runner), "next_token_logits", counted(type(runner).next_token_logits, steps))
    requests = [request._replace(until=(ends[n], "\0")) for n, request in enumerate(completions(args, maximum=20))]
    texts = complete(args, runner, requests, 2)
    assert texts == [text.split(end)[0] for text, end in zip(free, ends, strict=True)]
    assert len(steps) < 5 * 20 / 2, "generation went on after the end of the texts"


def counted(function, calls):
    def wrapper(*arguments):
        calls.append(1)
        return function(*arguments)

    return wrapper


def test_a_special_token_ends_a_text_although_it_is_not_in_it(args, hf, monkeypatch):
    """<|padding|> is left out of detokenized text."""
    runner, script = twin_runner(args, hf), iter([70, 71, 1, 72])
    monkeypatch.setattr(runner, "next_token_logits", lambda *_: 5.0 * one_hot(next(script)))
    (request,) = completions(args, until=("<|padding|>",))[:1]
    assert complete(args, runner, [request]) == [args.tokenizer.detokenize([70, 71])]
    assert next(script) == 72


def one_hot(token):
    return torch.nn.functional.one_hot(torch.tensor([token]), 384).float()


def test_sampling_depends_on_the_seed_only(args, runner):
    greedy_texts = complete(args, runner, completions(args), 5)
    sampled = complete(args, runner, completions(args, temperature=1.5), 5)
    assert sampled != greedy_texts and sampled == complete(args, runner, completions(args, temperature=1.5), 5)
    twice = complete(args, runner, completions(args, temperature=1.5)[:1] * 2, 1)
    assert twice[0] != twice[1]


def test_a_context_needs_room(args, runner):
    with pytest.raises(DataError, match="max_gen_toks=48 of the task leaves no context in seq_length=48"):
        complete(args, runner, completions(args, maximum=48))
    with pytest.raises(DataError, match="at least one token"):
        complete(args, runner, [Completion(())])


def test_cut():
    assert cut("a b\nc. d", ["", ". ", "\n"]) == "a b"
    assert cut("abc", []) == "abc"


class WithBeginning:
    """A tokenizer that puts <s> = 1 before every text, as Llama's does."""

    eod = 2

    def tokenize(self, text):
        words = ["<s>", *text.split()]
        return [1 if word == "<s>" else len(word) + 10 for word in words]


def test_special_tokens_at_the_beginning(args):
    tokenizer = WithBeginning()
    assert encode(tokenizer, "a bb") == [1, 11, 12]
    assert encode(tokenizer, "<s> a bb") == [1, 11, 12]
    assert encode(tokenizer, "a bb", special=False) == [11, 12]
    assert first_context(tokenizer) == 1
    assert (
        encode(args.tokenizer, TEXT) == encode(args.tokenizer, TEXT, special=False) == hf_tokenizer()(TEXT)["input_ids"]
    )
    assert first_context(args.tokenizer) == args.tokenizer.eod


def test_requests_are_checked_together():
    with pytest.raises(ConfigError, match="eval_tasks is not set; name tasks with --eval_tasks"):
        Evaluation(twin_args())
    bad = dict(eval_limit=0, eval_num_fewshot=-1, eval_batch_size=0, perplexity_stride=49, eval_task_folder="no/such")
    with pytest.raises(ConfigError) as error:
        Evaluation(twin_args(perplexity_file="x", **bad))
    assert [problem.split("=")[0] for problem in error.value.problems] == [
        *("eval_num_fewshot", "eval_limit", "eval_batch_size", "perplexity_stride", "eval_task_folder")
    ]
    with pytest.raises(ConfigError, match="eval_results_prefix=no/such/run: no folder no/such to write to"):
        Evaluation(twin_args(perplexity_file=__file__, eval_results_prefix="no/such/run"))


def test_command_line():
    names, overrides = parse_deepy([__file__, "a", "--eval_tasks", "x", "y", "--perplexity", "t.txt"])
    assert names == ["a.yml"]
    assert overrides == dict(user_script=__file__, eval_tasks=["x", "y"], perplexity_file="t.txt")


def test_results_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = {"results": {"t": {"alias": "t", "acc,none": 0.5, "n": torch.tensor(3)}}, "perplexity": {"loss": 2.0}}
    first, second = write_results(results), write_results(results, "run")
    assert first.startswith("eval_results_") and second.startswith("run_eval_results_")
    assert json.loads((tmp_path / second).read_text())["results"]["t"]["n"] == 3
    assert scalars_of(results) == {"eval/t_acc,none": 0.5, "eval/perplexity_loss": 2.0}
    with pytest.raises(TypeError):
        write_results({(1,): 2}, "bad")  # keys that JSON cannot hold
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([first, second])
