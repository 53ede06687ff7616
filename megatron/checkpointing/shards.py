"""How each parameter is split over tensor-parallel ranks: the one table, read in both directions.

Where a block is cut says `megatron.mpu.share_sizes`, as for initial weights; here are the names.
"""

import re
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from megatron import mpu
from megatron.errors import CheckpointError
from megatron.model.attention.self_attention import dense_column_groups, qkv_row_groups
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER

VOCABULARY = re.compile(r"word_embeddings\.weight|final_linear\.(weight|bias)")
"""[padded vocabulary, h], and the bias [padded vocabulary]: rows whose number depends on the number of ranks."""

_QKV = re.compile(r"attention\.query_key_value\.(weight|bias)")
_TE_QKV = re.compile(r"attention\.qkv\.(weight|bias)")
_QK_NORM = re.compile(r"attention\.([qk])_layernorm\.(norm\.)?(weight|bias|scale|g)")  # norm: of Transformer Engine
_LINEAR1 = re.compile(r"mlp\.(linear1\.|fc1_)(weight|bias)")
"""A gated one stacks two branches: linear1 [up; gate], fc1 (Transformer Engine's) [gate; up]; split alike."""
_ROWS = re.compile(r"attention\.qk_layernorm\.(weight|bias|scale)|attention\.alibi_embed\.slopes")
_COLUMNS = re.compile(r"(attention\.(dense|proj|rpe)|mlp\.linear2)\.weight|mlp\.fc2_weight")
_ROW_BIAS = re.compile(r"(attention\.(dense|proj)|mlp\.linear2)\.bias|mlp\.fc2_bias")
_REPLICATED = re.compile(
    r"(input_layernorm|post_attention_layernorm|attention_output_layernorm|mlp_output_layernorm|norm)"
    r"(\.norm)?\.(weight|bias|scale|g)|attention\.qk_layernorm\.g"
    r"|layer_scalar|position_embeddings\.(weight|inv_freq)|attention\.rotary_emb\.inv_freq"
    r"|mlp\.layer_norm_(weight|bias)|(.*\.)?_extra_state"
)
_OF_GROUP = re.compile(r"attention\.groups\.(\d+)\.(.+)")
"""What a group of heads has for itself, in a layer of several groups."""
_ADAPTER = re.compile(r"(.+)\.lora\.([AB])")


class Split(NamedTuple):
    """How one parameter is split: along `dim` in `groups` (see mpu.shard); dim None: each rank has all of it.

    summed: the ranks' copies are terms of a sum.
    """

    dim: Optional[int] = None
    groups: Optional[List[int]] = None
    summed: bool = False


class Shards:
    """Joins and splits the parameters of one model.

    average: replicated parameters that differ between the ranks, as they can after a long run in half precision,
        are averaged; otherwise they are an error.
    empty: makes the tensors that results are put into, from shape and dtype; None: new ones.
    """

    def __init__(
        self,
        neox_args,
        average: bool = False,
        empty: Optional[Callable[[Sequence[int], torch.dtype], torch.Tensor]] = None,
    ):
        self.neox_args = neox_args
        self.average = average
        self._empty = empty

    def split_of(self, index: int, name: str) -> Split:
        """The rule of parameter `name` of layer `index`. Raises CheckpointError for a name that no model here has."""
        number = index - FIRST_TRANSFORMER_LAYER
        name, group = _without_group(name)
        adapter = _ADAPTER.fullmatch(name)
        if adapter:  # one of the two is split as the weight that they adapt: B by its rows, or A by its columns
            rule = self.split_of(index, f"{adapter.group(1)}.weight")
            return rule if adapter.group(2) == "BA"[rule.dim] else Split()
        if _QKV.fullmatch(name):
            geometry = self.neox_args.head_geometry(number)
            return Split(0, qkv_row_groups(geometry) or [geometry.qkv_hidden_size])
        if name == "attention.dense.weight":
            return Split(1, dense_column_groups(self.neox_args.head_geometry(number)))
        if _TE_QKV.fullmatch(name):  # by whole kv heads
            return Split(0, [self.neox_args.head_geometry(number).qkv_hidden_size])
        if _QK_NORM.fullmatch(name):
            return self._qk_norm_split(number, name, group)
        if _LINEAR1.fullmatch(name):
            geometry = self.neox_args.mlp_geometry(number)
            return Split(0, [geometry.ffn_hidden_size] * (2 if geometry.gated else 1))
        if VOCABULARY.fullmatch(name) or _ROWS.fullmatch(name):
            return Split(0)
        if _COLUMNS.fullmatch(name):
            return Split(1)
        if _ROW_BIAS.fullmatch(name):
            return Split(summed=self.neox_args.gpt_j_residual)
        if _REPLICATED.fullmatch(name):
            return Split()
        raise CheckpointError(f"layer {index} {name}: not a parameter of these models, so how to split it is unknown")

    def _qk_norm_split(self, number: int, name: str, group: int) -> Split:
        """A weight over one head serves all heads on all ranks; one over all heads (of a group) is split by heads."""
        if self.neox_args.layer_attention(number).qk_norm != "full_width":
            return Split()
        geometry = self.neox_args.head_geometry(number).groups[group]
        is_query = _QK_NORM.fullmatch(name).group(1) == "q"
        return Split(0, [geometry.query_hidden_size if is_query else geometry.kv_hidden_size])

    def join(self, index: int, name: str, shards: List[torch.Tensor]) -> torch.Tensor:
        """The whole parameter from the shards of all ranks, in rank order; with one shard, that itself.

        Raises CheckpointError if the shards do not fit together, or not to the config.
        """
        if len(shards) == 1:
            return shards[0]
        rule = self.split_of(index, name)
        if rule.summed:
            return _sum(shards)
        if rule.dim is None:
            return self._agreed(index, name, shards)
        if not _fit_together(shards, rule):
            raise CheckpointError(f"layer {index} {name}: the ranks' shards have different shapes or dtypes")
        size = sum(shard.shape[rule.dim] for shard in shards)
        self._check_size(index, name, rule, size)
        sizes = [mpu.share_sizes(rule.groups or [size], rank, len(shards)) for rank in range(len(shards))]
        by_rank = [shard.split(each, rule.dim) for shard, each in zip(shards, sizes, strict=True)]
        return self._cat([piece for pieces in zip(*by_rank, strict=True) for piece in pieces], rule.dim)

    def piece(self, index: int, name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """One rank's share of a whole parameter: inverse of `join`. A tensor of its own, or `whole` itself.

        Raises CheckpointError if the parameter does not fit the config or does not split evenly.
        """
        if ranks == 1:
            return whole
        rule = self.split_of(index, name)
        if rule.summed:
            return whole if rank == 0 else torch.zeros_like(whole)
        if rule.dim is None:
            return whole
        size = whole.shape[rule.dim]
        self._check_size(index, name, rule, size)
        self._check_ranks(index, name, rule, size, ranks)
        shares = [mpu.share_sizes([block], each, ranks)[0] for block in rule.groups or [size] for each in range(ranks)]
        return self._cat(whole.split(shares, rule.dim)[rank::ranks], rule.dim)

    def _cat(self, pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        first = pieces[0]
        shape = (*first.shape[:dim], sum(piece.shape[dim] for piece in pieces), *first.shape[dim + 1 :])
        if first.is_meta:  # torch.cat is written in Python there, and its first call takes a second
            return first.new_empty(shape)
        out = None if self._empty is None else self._empty(shape, first.dtype)
        return torch.cat(list(pieces), dim, out=out)

    def split(self, index: int, name: str, whole: torch.Tensor, ranks: int) -> List[torch.Tensor]:
        """The shares of all ranks."""
        return [self.piece(index, name, whole, rank, ranks) for rank in range(ranks)]

    def _check_size(self, index: int, name: str, rule: Split, size: int) -> None:
        wanted = sum(rule.groups) if rule.groups else size
        if size != wanted:
            raise CheckpointError(
                f"layer {index} {name}: {size} rows over all ranks in the checkpoint, {wanted} by the config; use the "
                "config that the checkpoint was made with"
            )

    def _check_ranks(self, index: int, name: str, rule: Split, size: int, ranks: int) -> None:
        """Rows of heads may be dealt out unevenly, where ranks share a head; others not."""
        name, _ = _without_group(name)
        if _QKV.fullmatch(_ADAPTER.sub(r"\1.weight", name)) or _QK_NORM.fullmatch(name):
            problems = self.neox_args.head_geometry(index - FIRST_TRANSFORMER_LAYER).shard_problems(ranks)
        else:
            uneven = any(block % ranks for block in rule.groups or [size])
            problems = [f"{size} does not split over model_parallel_size={ranks}"] if uneven else []
        if problems:
            raise CheckpointError(f"layer {index} {name}: {'; '.join(problems)}")

    def _agreed(self, index: int, name: str, copies: List[torch.Tensor]) -> torch.Tensor:
        if all(torch.equal(copies[0], copy) for copy in copies[1:]):
            return copies[0]
        if any(copy.shape != copies[0].shape for copy in copies):
            raise CheckpointError(f"layer {index} {name}: the ranks' copies have different shapes")
        if self.average:
            return torch.stack([copy.double() for copy in copies]).mean(0).to(copies[0].dtype)
        apart = max((copies[0].double() - copy.double()).abs().max().item() for copy in copies[1:])
        raise CheckpointError(
            f"layer {index} {name}: the tensor-parallel ranks should have equal copies, and they differ by up to "
            f"{apart:.3g}; if they drifted apart in training, `python tools/ckpts/reshard.py --average-replicas` "
            "takes their mean"
        )


def _without_group(name: str) -> Tuple[str, int]:
    """(the name that a parameter of a group of heads would have in a layer of that group alone, the group's number)."""
    of_group = _OF_GROUP.fullmatch(name)
    return (f"attention.{of_group.group(2)}", int(of_group.group(1))) if of_group else (name, 0)


def _fit_together(shards: List[torch.Tensor], rule: Split) -> bool:
    """Of one dtype and shape, but for a row more or less where a block of `rule.groups` does not divide."""
    sizes = [shard.shape[rule.dim] for shard in shards]
    others = {(shard.shape[: rule.dim], shard.shape[rule.dim + 1 :], shard.dtype) for shard in shards}
    wanted = [sizes[0]] * len(shards)
    if rule.groups is not None and sum(rule.groups) == sum(sizes):
        wanted = [sum(mpu.share_sizes(rule.groups, rank, len(shards))) for rank in range(len(shards))]
    return len(others) == 1 and sizes == wanted


def _sum(terms: List[torch.Tensor]) -> torch.Tensor:
    """In at least fp32, rounded once."""
    wide = torch.promote_types(terms[0].dtype, torch.float32)
    return torch.stack([term.to(wide) for term in terms]).sum(0).to(terms[0].dtype)
