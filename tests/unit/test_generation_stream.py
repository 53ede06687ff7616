"""The generation loop over a toy next-token rule, against a plain loop that knows nothing of batches or caches."""

from types import SimpleNamespace

import pytest
import torch

from megatron.errors import ConfigError, DataError, NeoXError
from megatron.text_generation import InferenceRunner, stream_tokens

VOCABULARY, PADDED, EOS, LIMIT = 23, 32, 0, 16


def toy_logits(sequence):
    """Depends on every token and its place; the padded columns are the largest, so taking one is noticed."""
    total = sum((place + 1) * (token + 3) for place, token in enumerate(sequence))
    logits = torch.randn(PADDED, generator=torch.Generator().manual_seed(total))
    logits[VOCABULARY:] = 50.0
    return logits


def plain_greedy(prompt, steps, eos=EOS):
    """(tokens without eos, ended)."""
    sequence = list(prompt)
    for _ in range(steps):
        if len(sequence) == LIMIT:
            break
        token = int(toy_logits(sequence)[:VOCABULARY].argmax())
        if token == eos:
            return sequence[len(prompt) :], True
        sequence.append(token)
    return sequence[len(prompt) :], False


class ToyRunner(InferenceRunner):
    """Remembers what was fed, as a KV cache would, and objects to gaps."""

    draws = True

    def __init__(self):
        self.device = torch.device("cpu")
        self.cache = None
        self.fed, self.starts = [], []

    def start(self, batch_size, max_tokens, use_cache=True):
        self.starts.append((batch_size, max_tokens, use_cache))
        self.history, self.room, self.use_cache = [[] for _ in range(batch_size)], max_tokens, use_cache

    def next_token_logits(self, tokens, position_ids):
        if not self.use_cache:
            self.history = [[] for _ in self.history]
        self.fed.append(tokens.shape[1])
        for row, history in enumerate(self.history):
            assert position_ids[row].tolist() == list(range(len(history), len(history) + tokens.shape[1]))
            history.extend(tokens[row].tolist())
            assert len(history) <= self.room
        return torch.stack([toy_logits(history) for history in self.history])

    def share_tokens(self, chosen, batch_size):
        return chosen

    def share_logits(self, logits, batch_size):
        return logits


def toy_args(**changes):
    settings = dict(
        seq_length=LIMIT,
        max_position_embeddings=LIMIT,
        padded_vocab_size=PADDED,
        seed=1234,
        return_logits=False,
        load="somewhere",
        precision="fp16",
        num_layers=0,
        tokenizer=SimpleNamespace(eod=EOS, vocab_size=VOCABULARY),
    )
    return SimpleNamespace(**{**settings, **changes})


def finish(prompts, **options):
    """The last state and the runner."""
    runner = ToyRunner()
    *_, state = stream_tokens(toy_args(), runner, prompts, **options)
    return state, runner


def generated(state, row=0):
    return state.tokens[row, state.start_index[row] : state.end_index[row] + 1].tolist()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("prompt", [[5], [7, 3, 9], [1, 2, 3, 4, 5, 6, 7, 8]])
@pytest.mark.parametrize("steps", [1, 4, None])
def test_one_prompt_equals_the_plain_loop(prompt, steps, recompute):
    state, runner = finish([prompt], maximum_tokens=steps, recompute=recompute)
    tokens, ended = plain_greedy(prompt, LIMIT if steps is None else steps)
    assert generated(state) == tokens and bool(state.is_done[0]) == ended
    assert state.start_index.tolist() == [len(prompt)]
    if not recompute:
        assert runner.fed == [len(prompt)] + [1] * (len(runner.fed) - 1), "one prefill, then single tokens"


@pytest.mark.parametrize("recompute", [False, True])
def test_rows_of_unequal_length_give_what_each_gives_alone(recompute):
    prompts = [[5], [7, 3, 9], [1, 2, 3, 4, 5, 6], [8, 8]]
    state, _ = finish(prompts, maximum_tokens=10, recompute=recompute)
    for row, prompt in enumerate(prompts):
        tokens, ended = plain_greedy(prompt, 1 + 10 - len(prompt))
        assert state.tokens[row, : len(prompt)].tolist() == prompt
        assert generated(state, row) == tokens and bool(state.is_done[row]) == ended


def test_yields_after_each_token_from_the_shortest_prompt_on():
    prompts = [[5, 6], [7, 3, 9, 1]]
    ends = [state.end_index.tolist() for state in stream_tokens(toy_args(), ToyRunner(), prompts, maximum_tokens=4)]
    assert ends == [[2, -1], [3, -1], [4, 4], [5, 5]]


def eos_after(prompt, number):
    """The token that the plain loop generates at place `number`, to be used as end-of-text token."""
    return plain_greedy(prompt, LIMIT, eos=-1)[0][number]


def test_end_of_text_is_left_out_and_ends_the_row():
    prompt = [7, 3, 9]
    eos = eos_after(prompt, 1)
    state, runner = finish([prompt], eos_token_id=eos)
    assert generated(state) == plain_greedy(prompt, 1)[0] and state.is_done.all()
    assert len(runner.fed) == 2, "generation went on after the end"
    assert state.tokens[0, len(prompt) + 1 :].unique().tolist() == [eos]


def test_end_of_text_at_once_gives_nothing():
    prompt = [7, 3, 9]
    state, _ = finish([prompt], eos_token_id=eos_after(prompt, 0))
    assert generated(state) == [] and state.end_index.tolist() == [-1] and state.is_done.all()


def test_end_of_text_zero_is_not_mistaken_for_absent():
    args = toy_args(tokenizer=SimpleNamespace(eod=22, vocab_size=VOCABULARY))
    *_, state = stream_tokens(args, ToyRunner(), [[5]], eos_token_id=0, maximum_tokens=1)
    assert state.tokens[0, -1] == 0


def test_prompt_that_contains_end_of_text_is_not_done():
    state, _ = finish([[5], [EOS, 4, EOS, 6]], maximum_tokens=6, eos_token_id=EOS)
    assert generated(state, 1) == plain_greedy([EOS, 4, EOS, 6], 3)[0]


@pytest.mark.parametrize("nested", [False, True])
def test_stop_group_ends_the_row_before_its_last_token(nested):
    prompt = [7, 3, 9]
    free = plain_greedy(prompt, 8)[0]
    group = free[2:4]
    stop_tokens = [[VOCABULARY - 1] * 20, group] if nested else group
    state, _ = finish([prompt], stop_tokens=stop_tokens)
    assert generated(state) == free[:3] and state.is_done.all()
    assert stop_tokens == ([[VOCABULARY - 1] * 20, group] if nested else group), "the caller's list was changed"


def test_stop_group_inside_a_prompt_does_not_end_it():
    long = [7, 3, 9, 4, 2, 6]
    state, _ = finish([[5], long], stop_tokens=[9, 4], maximum_tokens=8)
    assert generated(state, 1) == plain_greedy(long, 3)[0]


def test_context_length_is_the_end():
    prompt = [7, 3, 9]
    state, runner = finish([prompt], eos_token_id=VOCABULARY + 5, maximum_tokens=1000)
    assert state.end_index.tolist() == [LIMIT - 1] and not state.is_done.any()
    assert runner.starts == [(1, LIMIT - 1, True)], "the last token is never fed, so it needs no room"


def test_full_prompt_yields_nothing():
    assert list(stream_tokens(toy_args(), ToyRunner(), [[1] * LIMIT])) == []


def test_logits_are_those_the_tokens_were_chosen_from():
    prompts = [[5], [7, 3, 9]]
    args = toy_args(return_logits=True)
    *_, state = stream_tokens(args, ToyRunner(), prompts, maximum_tokens=5, temperature=0.7, top_k=3)
    assert state.logits.shape == (5, 2, VOCABULARY)
    for row in range(2):
        for step in range(5):
            assert torch.equal(state.logits[step, row], toy_logits(state.tokens[row, : 1 + step].tolist())[:VOCABULARY])


def test_sampling_repeats_with_the_seed_and_differs_without():
    def texts(seed):
        *_, state = stream_tokens(toy_args(seed=seed), ToyRunner(), [[5], [6]], temperature=2.0, eos_token_id=-1)
        return state.tokens.tolist()

    assert texts(1) == texts(1) != texts(2)


def test_padded_vocabulary_is_never_drawn():
    state, _ = finish([[5]] * 50, temperature=5.0, eos_token_id=-1)
    assert state.tokens.max() < VOCABULARY


@pytest.mark.parametrize(
    "prompts, options, error, words",
    [
        ([], {}, DataError, "no prompt"),
        ([[1], []], {}, DataError, "prompt 2 has no tokens"),
        ([[1], [1] * (LIMIT + 1)], {}, DataError, f"prompt 2 has {LIMIT + 1} tokens.*seq_length={LIMIT}"),
        ([[1]], dict(maximum_tokens=0), ConfigError, "maximum_tokens=0"),
        ([[1]], dict(temperature=-1.0), ConfigError, "temperature=-1.0"),
    ],
)
def test_bad_input_is_named(prompts, options, error, words):
    with pytest.raises(error, match=words):
        list(stream_tokens(toy_args(), ToyRunner(), prompts, **options))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, dict(temperature=1.0)])
def test_logits_that_are_not_finite_end_the_run(value, options):
    class Broken(ToyRunner):
        def next_token_logits(self, tokens, position_ids):
            logits = super().next_token_logits(tokens, position_ids)
            logits[1, 4] = value
            return logits

    with pytest.raises(NeoXError, match="logits at token 2 are not finite.*load=somewhere.*precision=fp16"):
        list(stream_tokens(toy_args(), Broken(), [[5, 6], [7, 8]], **options))
