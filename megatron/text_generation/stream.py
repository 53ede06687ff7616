"""The generation loop: prompts of unequal length in one batch, one more token in each row per step."""

from typing import Iterator, List, NamedTuple, Optional, Sequence, Set, Union

import torch

from megatron.errors import ConfigError, DataError, NeoXError
from megatron.text_generation.collective import from_rank_0
from megatron.text_generation.runner import InferenceRunner
from megatron.text_generation.sampling import SamplingSettings, choose_tokens, seeded_generator

_NOT_FINITE = -100
StopTokens = Optional[Union[List[int], List[List[int]]]]


class StreamState(NamedTuple):
    """What `stream_tokens` yields after each step. The tensors are updated in place by the next step."""

    tokens: torch.Tensor
    """int64 [b, seq_length]: prompts and what was generated so far, padded with the end-of-text token."""
    start_index: torch.Tensor
    """int64 [b]: index of the first generated token, i.e. the length of the prompt."""
    end_index: torch.Tensor
    """int64 [b]: index of the last generated token, without the one that ended the text; -1 before there is one."""
    logits: Optional[torch.Tensor]
    """fp32 [steps, b, v], before temperature and filters; step 0 predicts the index after the shortest prompt. None
    unless return_logits is set."""
    is_done: torch.Tensor
    """bool [b]: the row has ended with the end-of-text token or a stop group."""


def context_limit(neox_args) -> int:
    """The most tokens, prompt included, that a text may have."""
    return min(neox_args.seq_length, neox_args.max_position_embeddings)


def end_of_generation(neox_args, start: int, maximum_tokens: Optional[int]) -> int:
    """Index before which the last token may be generated, for prompts of which the shortest has `start` tokens.

    Raises ConfigError for a maximum_tokens that generates nothing.
    """
    if maximum_tokens is not None and maximum_tokens < 1:
        raise ConfigError(f"maximum_tokens={maximum_tokens} must be at least 1")
    limit = context_limit(neox_args)
    return limit if maximum_tokens is None else min(limit, start + maximum_tokens)


def vocabulary_size(neox_args) -> int:
    """Columns of the logits that stand for a token; the rest only pads the embedding."""
    tokenizer = getattr(neox_args, "tokenizer", None)
    if tokenizer is None:
        return neox_args.padded_vocab_size
    return min(tokenizer.vocab_size, neox_args.padded_vocab_size)


def stream_tokens(
    neox_args,
    model,
    context_tokens: List[List[int]],
    eos_token_id: Optional[int] = None,
    maximum_tokens: Optional[int] = None,
    recompute: bool = False,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 0.0,
    stop_tokens: StopTokens = None,
    generator: Optional[torch.Generator] = None,
) -> Iterator[StreamState]:
    """Continue the prompts `context_tokens` (token ids, unpadded) and yield the state after each token.

    Generation starts at the end of the shortest prompt; longer prompts keep their own tokens until they end, so they
    get fewer new ones. It ends when every row has produced eos_token_id (default: the tokenizer's eod) or one of
    the stop groups, after maximum_tokens steps (None: no such limit), or at the context length. A row that has ended is
    padded. `recompute` runs the whole sequence at each step instead of keeping a KV cache. `stop_tokens` is one group
    of ids or a list of groups. Greedy if temperature, top_k and top_p are all 0; otherwise drawn from `generator`
    (default: one seeded with neox_args.seed). All ranks must call it; rank 0's prompts are used.

    Raises ConfigError for bad settings, DataError for an empty prompt or one beyond the context length, and NeoXError
    when the model's logits are not finite.
    """
    settings = SamplingSettings(temperature, top_k, top_p)
    prompts = from_rank_0(lambda: [list(prompt) for prompt in context_tokens])
    limit = context_limit(neox_args)
    _check_prompts(prompts, limit)
    eos = neox_args.tokenizer.eod if eos_token_id is None else eos_token_id
    runner = InferenceRunner.of(neox_args, model)
    generator = seeded_generator(runner.device, neox_args.seed) if generator is None else generator

    first = min(len(prompt) for prompt in prompts)
    end = end_of_generation(neox_args, first, maximum_tokens)
    batch = _Batch(prompts, limit, eos, _stop_groups(stop_tokens), runner.device)
    if neox_args.return_logits:
        batch.logits = torch.zeros(end - first, len(prompts), vocabulary_size(neox_args), device=runner.device)
    runner.start(len(prompts), end - 1, use_cache=not recompute)
    renewals = _cache_renewals(neox_args)
    for index in range(first, end):
        fed = 0 if recompute or index == first else index - 1
        if fed in renewals:
            runner.start(len(prompts), end - 1)
            fed = 0
        chosen = _next_tokens(neox_args, runner, batch, range(fed, index), settings, generator, step=index - first)
        batch.append(chosen, index)
        yield batch.state(steps=index - first + 1)
        if batch.is_done.all():
            return


def _cache_renewals(neox_args) -> Set[int]:
    """Numbers of cached tokens at which the cache is filled again, with the whole text: the original lengths of
    longrope, beyond which it rotates every key otherwise (Phi-3 in transformers does the same)."""
    rotaries = (neox_args.layer_attention(number).rotary for number in range(neox_args.num_layers))
    scalings = (None if rotary is None else rotary.scaling for rotary in rotaries)
    return {each.length_threshold for each in scalings if each is not None and each.rope_type == "longrope"}


def _next_tokens(neox_args, runner, batch, fed: range, settings, generator, step: int) -> torch.Tensor:
    """Feed the tokens at the indices `fed` and choose the next one of each row -> int64 [b], on every rank."""
    tokens = batch.tokens[:, fed.start : fed.stop]
    position_ids = torch.arange(fed.start, fed.stop, device=runner.device).expand(len(tokens), -1)
    logits = runner.next_token_logits(tokens, position_ids)
    vocabulary = vocabulary_size(neox_args)
    chosen = _choose_or_mark(logits[:, :vocabulary], settings, generator) if runner.draws else None
    if batch.logits is not None:
        batch.logits[step] = runner.share_logits(logits, len(tokens))[:, :vocabulary]
    chosen = runner.share_tokens(chosen, len(tokens))
    if (chosen == _NOT_FINITE).any():  # on every rank, so none is left waiting
        raise NeoXError(
            f"the model's logits at token {fed.stop} are not finite: the weights in load={neox_args.load} are damaged "
            f"or overflow in precision={neox_args.precision}; try an earlier checkpoint, or precision bfloat16 or fp32"
        )
    return chosen


def _choose_or_mark(logits: torch.Tensor, settings: SamplingSettings, generator) -> torch.Tensor:
    """`choose_tokens`, with _NOT_FINITE for rows that have infinities or NaN, from which no choice means anything."""
    least, most = logits.aminmax(dim=-1)
    broken = ~(least.isfinite() & most.isfinite())  # NaN is both, in a row that has one
    if not settings.greedy:  # cannot draw from such a row at all
        logits = logits.masked_fill(broken[:, None], 0)
    return choose_tokens(logits, settings, generator).masked_fill(broken, _NOT_FINITE)


class _Batch:
    """The rows being generated and where each of them stands."""

    def __init__(self, prompts: Sequence[List[int]], limit: int, eos: int, stop_groups: List[List[int]], device):
        rows = [prompt + [eos] * (limit - len(prompt)) for prompt in prompts]
        self.tokens = torch.tensor(rows, dtype=torch.int64, device=device)
        self.start_index = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.end_index = torch.full_like(self.start_index, -1)
        self.is_done = torch.zeros_like(self.start_index, dtype=torch.bool)
        self.logits: Optional[torch.Tensor] = None
        self.eos = eos
        self.stop_groups = [torch.tensor(group, device=device) for group in stop_groups]

    def append(self, chosen: torch.Tensor, index: int) -> None:
        """Put the chosen tokens [b] at `index` of the rows whose prompt has ended and that are not done."""
        generating = (self.start_index <= index) & ~self.is_done
        self.tokens[:, index] = torch.where(generating, chosen, self.tokens[:, index])
        ended = (chosen == self.eos) | self._stop_group_ends_at(index)
        self.is_done |= generating & ended
        self.end_index[generating & ~ended] = index

    def state(self, steps: int) -> StreamState:
        logits = None if self.logits is None else self.logits[:steps]
        return StreamState(self.tokens, self.start_index, self.end_index, logits, self.is_done)

    def _stop_group_ends_at(self, index: int) -> torch.Tensor:
        found = torch.zeros_like(self.is_done)
        for group in self.stop_groups:
            start = index + 1 - len(group)
            if start >= 0:
                found |= (self.tokens[:, start : index + 1] == group).all(dim=-1)
        return found


def _stop_groups(stop_tokens: StopTokens) -> List[List[int]]:
    """A flat list is one group; empty groups would match everywhere and are dropped."""
    if not stop_tokens:
        return []
    groups = stop_tokens if isinstance(stop_tokens[0], (list, tuple)) else [stop_tokens]
    return [list(group) for group in groups if len(group)]


def _check_prompts(prompts: Sequence[List[int]], limit: int) -> None:
    if not prompts:
        raise DataError("there is no prompt to continue")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise DataError(f"prompt {number} has no tokens; start it with the end-of-text token")
        if len(prompt) > limit:
            raise DataError(f"prompt {number} has {len(prompt)} tokens, more than seq_length={limit}; shorten it")
