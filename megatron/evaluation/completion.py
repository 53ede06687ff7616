"""Texts that continue given contexts until one of given strings: greedy or sampled, with the KV cache, in batches."""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from megatron.errors import DataError
from megatron.text_generation.runner import InferenceRunner
from megatron.text_generation.sampling import SamplingSettings, seeded_generator
from megatron.text_generation.stream import StreamState, context_limit, stream_tokens


class Completion(NamedTuple):
    """A text to be completed: token ids of the context, the strings that end the text, its most tokens, and how
    they are chosen. Contexts that leave no room for maximum_tokens lose their beginning."""

    context: Tuple[int, ...]
    until: Tuple[str, ...] = ()
    maximum_tokens: int = 256
    sampling: SamplingSettings = SamplingSettings()


def check_completions(neox_args, requests: Sequence[Completion]) -> None:
    """Raises DataError for a request that cannot be met."""
    limit = context_limit(neox_args)
    for request in requests:
        if not request.context:
            raise DataError("a context to be completed needs at least one token")
        if not 0 < request.maximum_tokens < limit:
            raise DataError(
                f"max_gen_toks={request.maximum_tokens} of the task leaves no context in seq_length={limit}; set "
                "generation_kwargs: {max_gen_toks: ...} in a copy of the task"
            )


def complete(
    neox_args,
    model,
    requests: Sequence[Completion],
    batch_size: int = 1,
    on_progress: Optional[Callable[[int], None]] = None,
) -> List[str]:
    """The text of each request, without the string that ended it. All ranks call it with the same requests.

    Texts that end in the same way are generated together, those of similar length first; each is what it would be
    alone, up to the rounding of another batch size. Data-parallel replicas all do the same.
    """
    check_completions(neox_args, requests)
    runner = InferenceRunner.of(neox_args, model)
    texts = [""] * len(requests)
    for number, members in enumerate(_batches(requests, batch_size)):
        together = [requests[member] for member in members]
        for member, text in zip(members, _complete_together(neox_args, runner, together, number), strict=True):
            texts[member] = text
        if on_progress is not None:
            on_progress(len(members))
    return texts


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of the strings in it; empty strings end nothing."""
    for end in filter(None, until):
        text = text.split(end)[0]
    return text


def _batches(requests: Sequence[Completion], batch_size: int) -> List[List[int]]:
    groups: Dict[tuple, List[int]] = {}
    for number in sorted(range(len(requests)), key=lambda number: -len(requests[number].context)):
        groups.setdefault(requests[number][1:], []).append(number)
    return [
        group[start : start + batch_size] for group in groups.values() for start in range(0, len(group), batch_size)
    ]


def _complete_together(neox_args, runner: InferenceRunner, requests: List[Completion], number: int) -> List[str]:
    """One batch. `number` makes its random stream another one than that of the batches before."""
    _, until, maximum, sampling = requests[0]
    room = context_limit(neox_args) - maximum
    contexts = [list(request.context[-room:]) for request in requests]
    lengths = [len(context) for context in contexts]
    watch = _Watch(neox_args.tokenizer, until, maximum, len(requests))
    steps = stream_tokens(
        neox_args,
        runner,
        contexts,
        maximum_tokens=max(lengths) - min(lengths) + maximum,  # counted from the end of the shortest context
        stop_tokens=watch.stop_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        generator=seeded_generator(runner.device, neox_args.seed, number),
    )
    for state in steps:
        if watch.all_ended(state):  # every rank has the same tokens, so all stop at the same step
            break
    return watch.texts(state)


class _Watch:
    """Sees when each text of a batch has ended."""

    def __init__(self, tokenizer, until: Sequence[str], maximum: int, rows: int):
        self._tokenizer = tokenizer
        self._until = [end for end in until if end]
        self._maximum = maximum
        self._ended = [False] * rows
        # A token has at least one byte, so this many tokens reach back beyond a string that has just become complete.
        self._tail = max((len(end.encode()) for end in self._until), default=0) + 4
        self.stop_tokens = [[token] for token in map(self._special_token, self._until) if token is not None]

    def _special_token(self, end: str) -> Optional[int]:
        """The token of a string such as <|im_end|>, which detokenized text may leave out."""
        token = self._tokenizer.vocab.get(end)
        return token if token is not None and self._tokenizer.detokenize([token]) == "" else None

    def all_ended(self, state: StreamState) -> bool:
        for row, done in enumerate(state.is_done.tolist()):
            if not self._ended[row]:
                tokens = self._tokens(state, row)
                self._ended[row] = done or len(tokens) >= self._maximum or self._holds_an_end(tokens)
        return all(self._ended)

    def _holds_an_end(self, tokens: List[int]) -> bool:
        """Looks only at the last tokens; one missed here costs time, for `texts` looks at the whole text."""
        if not self._until or not tokens:
            return False
        text = self._tokenizer.detokenize(tokens[-self._tail :])
        return any(end in text for end in self._until)

    def texts(self, state: StreamState) -> List[str]:
        texts = (self._tokenizer.detokenize(self._tokens(state, row)) for row in range(len(self._ended)))
        return [cut(text, self._until) for text in texts]

    def _tokens(self, state: StreamState, row: int) -> List[int]:
        start, end = int(state.start_index[row]), int(state.end_index[row])
        return state.tokens[row, start : min(end + 1, start + self._maximum)].tolist()
