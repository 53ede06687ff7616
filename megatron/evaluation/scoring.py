"""Log-probabilities of given tokens after given contexts, at any parallel layout.

Only the positions that are scored go through the output layer, in pieces, and their logits stay split over the
tensor-parallel ranks: no tensor of the size batch x length x vocabulary is made.
"""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from megatron import mpu
from megatron.errors import DataError, NeoXError
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER
from megatron.text_generation.runner import InferenceRunner
from megatron.text_generation.stream import context_limit, vocabulary_size

Pair = Tuple[Sequence[int], Sequence[int]]
"""Token ids of a context, which cannot be empty, and of its continuation."""

_LOGITS_AT_A_TIME = 2**26
"""Elements of the fp32 logits that one rank holds at once: 256 MiB."""


def check_pairs(neox_args, pairs: Sequence[Pair]) -> None:
    """Raises DataError for an empty context or continuation, or a continuation beyond the context length."""
    limit = context_limit(neox_args)
    for context, continuation in pairs:
        if not len(context) or not len(continuation):
            raise DataError("a context and its continuation need at least one token each")
        if len(continuation) > limit:
            raise DataError(
                f"a continuation of {len(continuation)} tokens is longer than the context, seq_length={limit}; "
                "score it in windows (loglikelihood_rolling)"
            )


def score(
    neox_args,
    model,
    pairs: Sequence[Pair],
    batch_size: int = 1,
    on_progress: Optional[Callable[[int], None]] = None,
) -> List[Tuple[float, bool]]:
    """For each pair: the log-probability (nats) of the continuation, and whether greedy decoding would give it.

    Tokens that do not fit in the context length are dropped from the left of the context. Columns of the logits that
    only pad the vocabulary have no probability. All ranks call it with the same pairs and get the same answers;
    data-parallel replicas share the work. on_progress is told the number of pairs done by this replica.
    Raises what `check_pairs` raises, and NeoXError where the model's logits are not finite.
    """
    check_pairs(neox_args, pairs)
    runner = InferenceRunner.of(neox_args, model)
    results = torch.zeros(len(pairs), 2, dtype=torch.float64, device=runner.device)
    with torch.no_grad():
        for numbers in _own_batches(neox_args, pairs, batch_size):
            values = _score_batch(neox_args, runner, [pairs[number] for number in numbers])
            if values is not None:
                results[numbers] = values
            if on_progress is not None:
                on_progress(len(numbers))
    _share(runner, results)
    if not results.isfinite().all():
        raise NeoXError(
            f"the model's logits are not finite: the weights in load={neox_args.load} are damaged or overflow in "
            f"precision={neox_args.precision}; try an earlier checkpoint, or precision bfloat16 or fp32"
        )
    return [(total, bool(greedy)) for total, greedy in results.tolist()]


class _Batch(NamedTuple):
    """tokens int64 [b, s], padded on the right; rows and columns int64 [k]: where a scored token is predicted;
    targets int64 [k]: the scored tokens, pair by pair."""

    tokens: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor


def _own_batches(neox_args, pairs: Sequence[Pair], batch_size: int) -> List[List[int]]:
    """Numbers of the pairs that this data-parallel replica runs together: the longest first, of similar length."""
    limit, thresholds = context_limit(neox_args), _length_thresholds(neox_args)
    lengths = [min(len(context) + len(continuation) - 1, limit) for context, continuation in pairs]
    groups: Dict[int, List[int]] = {}
    for number in sorted(range(len(pairs)), key=lambda number: -lengths[number]):
        # A rotary scaling that depends on the length must not see that of another text in the batch.
        groups.setdefault(sum(lengths[number] > each for each in thresholds), []).append(number)
    batches = [
        group[start : start + batch_size] for group in groups.values() for start in range(0, len(group), batch_size)
    ]
    return batches[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


def _length_thresholds(neox_args) -> List[int]:
    rotaries = (neox_args.layer_attention(number).rotary for number in range(neox_args.num_layers))
    scalings = (None if rotary is None else rotary.scaling for rotary in rotaries)
    found = {None if scaling is None else scaling.length_threshold for scaling in scalings}
    return sorted(found - {None})


def _score_batch(neox_args, runner: InferenceRunner, pairs: List[Pair]) -> Optional[torch.Tensor]:
    """float64 [b, 2]: log-probability and greediness of each pair; None except on the last pipeline stage."""
    batch = _assemble(pairs, context_limit(neox_args), runner.device)
    hidden = _run_layers(neox_args, runner, batch)
    if not runner.is_last_stage:
        return None
    _, head = runner.layers[-1]
    vocabulary, at_a_time = vocabulary_size(neox_args), _positions_at_a_time(neox_args)
    pieces = zip(hidden.split(at_a_time, dim=1), batch.targets.split(at_a_time), strict=True)
    measured = [_measure(head(piece).squeeze(0), targets, vocabulary) for piece, targets in pieces]  # [k, 2] in all
    totals = measured[0].new_zeros(len(pairs), 2).index_add_(0, batch.rows, torch.cat(measured))
    lengths = torch.tensor([len(continuation) for _, continuation in pairs], device=runner.device)
    return torch.stack([totals[:, 0], (totals[:, 1] == lengths).double()], dim=1)


def _assemble(pairs: List[Pair], limit: int, device: torch.device) -> _Batch:
    inputs = [[*context, *continuation][-(limit + 1) : -1] for context, continuation in pairs]
    longest = max(map(len, inputs))
    rows, columns, targets = [], [], []
    for row, (tokens, (_, continuation)) in enumerate(zip(inputs, pairs, strict=True)):
        rows += [row] * len(continuation)
        columns += range(len(tokens) - len(continuation), len(tokens))
        targets += continuation
    padded = [tokens + [0] * (longest - len(tokens)) for tokens in inputs]  # attention is causal: no one sees padding
    return _Batch(
        *(torch.tensor(values, dtype=torch.int64, device=device) for values in (padded, rows, columns, targets))
    )


def _run_layers(neox_args, runner: InferenceRunner, batch: _Batch) -> torch.Tensor:
    """This pipeline stage's layers, the output layer left out: on the last stage its input [1, k, h]."""
    layers = runner.layers[:-1] if runner.is_last_stage else runner.layers
    hidden = _input(neox_args, runner, batch)
    for index, layer in layers:
        hidden = layer(hidden)
        if index == runner.swap_back:
            hidden = hidden[batch.rows, batch.columns].unsqueeze(0)  # [b, s, h] -> [1, k, h]
    if not runner.is_last_stage:
        dist.send(hidden.contiguous(), runner.stages[runner.stage + 1])
    return hidden


def _input(neox_args, runner: InferenceRunner, batch: _Batch):
    """Tokens and positions on the first stage, else the hidden states of the stage before."""
    (size, length), first = batch.tokens.shape, runner.layers[0][0]
    if runner.stage == 0:
        return batch.tokens, torch.arange(length, device=runner.device).expand(size, -1)
    if first > runner.swap_back:
        shape = (1, len(batch.targets), neox_args.hidden_size)
    elif first < FIRST_TRANSFORMER_LAYER:
        shape = (size, length, neox_args.hidden_size)
    else:
        shape = (length, size, neox_args.hidden_size)
    hidden = torch.empty(shape, dtype=neox_args.params_dtype, device=runner.device)
    dist.recv(hidden, runner.stages[runner.stage - 1])
    return hidden


def _positions_at_a_time(neox_args) -> int:
    columns = neox_args.padded_vocab_size // mpu.get_model_parallel_world_size()
    return max(1, _LOGITS_AT_A_TIME // columns)


def _measure(logits: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """logits [k, v/p], targets [k] -> float64 [k, 2]: log-probability, and 1 where the target is the likeliest token.

    Of several likeliest tokens the first counts, as in argmax.
    """
    start = mpu.get_model_parallel_rank() * logits.shape[-1]
    tokens = torch.arange(start, start + logits.shape[-1], device=logits.device)
    values = logits.float().masked_fill(tokens >= vocabulary, -torch.inf)
    losses = mpu.vocab_parallel_cross_entropy(values, targets)
    largest = _over_model_parallel_ranks(values.amax(-1), dist.ReduceOp.MAX)
    first = torch.where(values == largest.unsqueeze(-1), tokens, vocabulary).amin(-1)
    likeliest = _over_model_parallel_ranks(first, dist.ReduceOp.MIN)
    return torch.stack([-losses.double(), (likeliest == targets).double()], dim=-1)


def _over_model_parallel_ranks(tensor: torch.Tensor, operation) -> torch.Tensor:
    if mpu.get_model_parallel_world_size() > 1:
        dist.all_reduce(tensor, op=operation, group=mpu.get_model_parallel_group())
    return tensor


def _share(runner: InferenceRunner, results: torch.Tensor) -> None:
    """From the last pipeline stage to all, then the replicas' parts, which are 0 elsewhere, added up; in place."""
    if len(runner.stages) > 1:
        dist.broadcast(results, runner.stages[-1], group=mpu.get_pipe_parallel_group())
    if mpu.get_data_parallel_world_size() > 1:
        dist.all_reduce(results, group=mpu.get_data_parallel_group())
