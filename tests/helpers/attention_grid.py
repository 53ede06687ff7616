"""Every kind of attention compared with one fp64 reference: backend x geometry x feature.

The grid is data (tests.helpers.attention_cases). `measure` fills one layer with known weights, runs it on this
process's share of the heads, and says how far output and gradients are from the reference, or returns the refusal.
"""

import contextlib
import warnings
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union
from unittest import mock

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron import mpu
from megatron.errors import BackendError, ConfigError
from megatron.model.attention import KVCache, ParallelSelfAttention
from megatron.model.attention.core import chunked, cpu_flash
from megatron.model.positional_embeddings import ParallelRelativePositionBias
from tests.helpers.attention_cases import BASE, BATCH, FEATURES, GEOMETRIES, LONG, Case, Feature, case_of, geometries
from tests.helpers.attention_reference import CACHE_REFERENCES, attention_reference
from tests.helpers.configs import tiny_args
from tests.helpers.te import WHEEL, install_te
from tests.helpers.te_attention import NAMES, as_te
from tests.helpers.tolerances import FORWARD, GRADIENT

PIECES = (5, 4, 1, 1, 1)
"""How the tokens of a text are fed to a cache: a prompt, a second piece of it, and one by one."""
BLOCK = 4
"""Tokens of a block where the chunked kernel is made to go block by block."""
BACKENDS = ("global", "flash", "chunked", "te")
"""The kinds of attention_config, and Transformer Engine's attention (te_mha)."""
RANKS = (1, 2, 4)


class Difference(NamedTuple):
    """Largest absolute difference of the output, and of any gradient (None without a backward pass)."""

    forward: float
    gradient: Optional[float] = None


Cell = Tuple[str, str, str]
"""Backend, geometry, feature."""
Result = Union[Difference, str]
"""Or the refusal: one line for each setting that is in the way."""


def allowed(feature: str) -> Difference:
    """How far a cell may be from the reference."""
    dtype = torch.bfloat16 if feature == "bf16" else torch.float32
    return Difference(FORWARD[dtype], None if FEATURES[feature].cache else GRADIENT[dtype])


def is_within(feature: str, difference: Difference) -> bool:
    """Whether a cell is close enough; NaN is not, nor is a missing gradient."""
    limits = allowed(feature)
    if (difference.gradient is None) != (limits.gradient is None):
        return False
    return difference.forward <= limits.forward and (limits.gradient is None or difference.gradient <= limits.gradient)


def available() -> List[str]:
    """The backends that can be imported here."""
    return [name for name in BACKENDS if name != "te" or (WHEEL / "transformer_engine").is_dir()]


def cells(backends: Iterable[str] = BACKENDS, ranks: int = 1) -> Iterator[Cell]:
    """Every cell of the grid; those that share a reference follow each other."""
    for geometry in geometries(ranks):
        for feature in FEATURES:
            for backend in backends:
                yield backend, geometry, feature


def measure_cells(rank: int, ranks: int, wanted: List[Cell], progress: str = "") -> List[Result]:
    """`measure` of each cell on one of `ranks` processes; for tests.helpers.distributed. progress: a bar of that name,
    on the first rank."""
    from megatron.initialize import initialize_megatron

    warnings.simplefilter("ignore", FutureWarning)  # of torch, about collectives
    if any(backend == "te" for backend, *_ in wanted):
        install_te()
    initialize_megatron(tiny_args(model_parallel_size=ranks, global_num_gpus=ranks))
    shown = tqdm(wanted, desc=progress, unit="cell", disable=not progress or rank > 0)
    return [measure(*cell) for cell in shown]


def measure(backend: str, geometry: str, feature: str) -> Result:
    """The difference of this rank's share of a cell from the reference, or the text of the refusal."""
    wanted = FEATURES[feature]
    try:
        args, attention = _build(backend, GEOMETRIES[geometry], wanted)
    except ConfigError as refusal:
        return "\n".join(refusal.problems)
    except BackendError as refusal:
        return str(refusal)
    case = case_of(geometry, feature)
    truths = _place(attention, backend, args, case)
    shipped = _compare(args, attention, case, truths)
    if backend != "chunked" or wanted.tokens == LONG:
        return shipped
    others = []
    for torch_kernel in (True, False):
        with in_blocks(torch_kernel):
            others.append(_compare(args, attention, case, truths))
    return largest([shipped, *others])


def largest(differences: Iterable[Difference]) -> Difference:
    """The worst output and the worst gradient."""
    forward, gradient = zip(*differences, strict=True)
    return Difference(_worst(forward), None if None in gradient else _worst(gradient))


def _worst(values: Iterable[float]) -> float:
    """The largest; NaN if one is NaN, which max() would lose."""
    values = list(values)
    return next((value for value in values if value != value), max(values))


@contextlib.contextmanager
def in_blocks(torch_kernel: bool):
    """The chunked kernel takes a short text to its own loops over blocks, or to torch's kernel where that can run it.

    As shipped it computes short texts with explicit scores.
    """
    with contextlib.ExitStack() as stack:
        for table in (chunked.EXPLICIT_KEYS, chunked.BLOCK):
            stack.enter_context(mock.patch.dict(table, cpu=0 if table is chunked.EXPLICIT_KEYS else BLOCK))
        stack.enter_context(mock.patch.object(cpu_flash, "MASKED_ROWS", BLOCK))
        if not torch_kernel:
            never = {"can": lambda *_: False, "can_backward": lambda *_: False}
            stack.enter_context(mock.patch.multiple(cpu_flash, **never))
        yield


def _compare(args, attention, case: Case, truths) -> Difference:
    return _through_cache(args, attention, case) if case.cache else _pass(args, attention, case, truths)


def _build(backend: str, numbers: Dict[str, Any], wanted: Feature):
    ranks = mpu.get_model_parallel_world_size()
    choice = dict(te_mha=True) if backend == "te" else dict(attention_config=[backend])
    lengths = dict(num_layers=1, seq_length=wanted.tokens, max_position_embeddings=wanted.tokens)
    layout = dict(model_parallel_size=ranks, global_num_gpus=ranks)
    args = tiny_args(**numbers, **wanted.settings, **choice, **lengths, **layout, rotary_emb_base=BASE)
    if backend == "te":
        from megatron.model.transformer_engine import TEMultiheadAttention

        return args, TEMultiheadAttention(args)
    rpe = None
    if args.pos_emb == "rpe":
        rpe = ParallelRelativePositionBias(args, numbers["num_attention_heads"])
    return args, ParallelSelfAttention(args, rpe=rpe).to(args.params_dtype)


def _place(attention, backend: str, args, case: Case) -> Dict[str, Tuple[torch.nn.Parameter, torch.Tensor]]:
    """Give every parameter its share of the weights. Returns {name: (parameter, its share of the true gradient)}."""
    weights, gradients = case.weights, case.gradients
    if backend == "te":
        geometry = args.head_geometry()
        weights = as_te(weights, geometry)
        gradients = as_te({name: case.gradients[name] for name in NAMES if case.gradients}, geometry)
    placed = {}
    for name, parameter in attention.named_parameters():
        with torch.no_grad():
            parameter.copy_(_share(parameter, weights[name]))
        placed[name] = parameter, _share(parameter, gradients[name]) if gradients else None
    assert placed.keys() == weights.keys(), f"{placed.keys()} are not {weights.keys()}"
    return placed


def _share(parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    dim, ranks = getattr(parameter, "partition_dim", None), mpu.get_model_parallel_world_size()
    if dim is None or ranks == 1:
        return whole
    return mpu.shard(whole, dim, mpu.get_model_parallel_rank(), ranks, getattr(parameter, "partition_groups", None))


def _pass(args, attention, case: Case, truths) -> Difference:
    """Forward and backward; under sequence_parallel, of this rank's tokens."""
    ranks, rank = mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()
    parts, part = (ranks, rank) if args.sequence_parallel else (1, 0)
    tensors = (case.hidden, case.upstream, case.output, case.gradients["input"])
    hidden, upstream, output, gradient = (x.chunk(parts)[part] for x in tensors)
    hidden = hidden.clone().requires_grad_()
    attention.zero_grad()
    found = _with_bias(attention(hidden))
    found.backward(upstream)
    pairs = [(hidden.grad, gradient), *((parameter.grad, truth) for parameter, truth in truths.values())]
    return Difference(_apart(found, output), _worst(_apart(*pair) for pair in pairs))


def _with_bias(result) -> torch.Tensor:
    output, bias = result
    return output if bias is None else output + bias


def _apart(found: torch.Tensor, truth: torch.Tensor) -> float:
    assert found.shape == truth.shape, f"{tuple(found.shape)} is not {tuple(truth.shape)}"
    return (found.detach().double() - truth).abs().max().item()


@torch.no_grad()
def _through_cache(args, attention, case: Case) -> Difference:
    """Prompt, second piece, single tokens. Of an 8-bit cache also the keys and values that went in."""
    cache = KVCache(args, [0], BATCH, sum(PIECES))[0]
    entered = _recorded(cache) if args.kv_cache_dtype else None
    pieces = case.hidden.split(PIECES)
    found = torch.cat([_with_bias(attention(piece, kv_cache=cache)) for piece in pieces])
    if entered is None:
        return Difference(_apart(found, case.output))
    differences = []

    def stored(*exact):
        """Rounded as the format says; what was rounded is ours, as the last bit decides between two roundings."""
        whole = [_all_heads(torch.cat(parts), args) for parts in zip(*entered, strict=True)]
        differences.extend(_apart(*pair) for pair in zip(whole, exact, strict=True))
        return tuple(CACHE_REFERENCES[args.kv_cache_dtype](x) for x in whole)

    weights = {name: values.double() for name, values in case.weights.items()}
    output = attention_reference(weights, case.hidden.double(), case.function, stored)
    return Difference(_worst([_apart(found, output), *differences]))


def _recorded(cache) -> list:
    """(k, v) of every call of cache.append from now on."""
    entered, append = [], cache.append

    def recording(k, v):
        entered.append((k.clone(), v.clone()))
        return append(k, v)

    cache.append = recording
    return entered


def _all_heads(own: torch.Tensor, args) -> torch.Tensor:
    """[s, b, this rank's heads, d] -> [s, b, all heads, d]; of ranks with the same head, the first counts."""
    ranks = mpu.get_model_parallel_world_size()
    if ranks == 1:
        return own
    shares = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(shares, own.contiguous(), group=mpu.get_model_parallel_group())
    return torch.cat(shares[:: args.head_geometry().kv_replicas(ranks)], dim=2)
