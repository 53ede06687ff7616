"""The integers that decide every attention and MLP width, and the only arithmetic on them.

`HeadGeometry` is built once from the config and handed to everything that needs a width: projections, rotary
tables, KV caches, converters, cost estimates and checks. Nothing else divides `hidden_size` by a head count.

Letters: h hidden_size, n query heads, m key/value heads, d head_dim, r rotary_ndims. Where keys are values too,
(n + m)·d stands for every (n + 2m)·d.
"""

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Dict, List, Optional, Tuple

from megatron.errors import ConfigError

STAMP_VERSION = 1


class QKVLayout(Enum):
    """Row order of a fused QKV weight on disk. Shapes cannot tell the three apart."""

    PER_HEAD = "per_head"
    """For each head: its q, k and v rows. GPT-NeoX when m equals n."""
    PER_RANK = "per_rank"
    """On each tensor-parallel rank: all q rows, all k rows, all v rows. GPT-NeoX when m < n."""
    PER_GROUP = "per_group"
    """For each kv head: its q heads, its k, its v. Transformer Engine with `fuse_qkv_params`."""


@dataclass(frozen=True)
class HeadGeometry:
    """The widths of one attention layer (whole model, or one rank's share after `shard`)."""

    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_ndims: int = 0
    shared_key_value: bool = False
    """Keys and values are one projection (Gemma 4): no rows for values."""

    @classmethod
    def from_config(
        cls,
        hidden_size: int,
        num_attention_heads: int,
        num_kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        rotary_pct: Optional[float] = None,
        shared_key_value: bool = False,
    ) -> "HeadGeometry":
        """Build the geometry a config asks for.

        num_kv_heads None means as many as query heads; head_dim None means hidden_size / num_attention_heads,
        which must then be whole; rotary_pct None means no rotary embedding.

        Raises ConfigError with every problem found.
        """
        problems = _positive_int_problems(
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        if problems:
            raise ConfigError(problems)
        kv_heads = num_attention_heads if num_kv_heads is None else num_kv_heads
        if num_attention_heads % kv_heads:
            problems.append(
                f"num_attention_heads={num_attention_heads} is not a multiple of num_kv_heads={kv_heads}; every "
                "key/value head must serve the same number of query heads"
            )
        if head_dim is None and hidden_size % num_attention_heads:
            problems.append(
                f"hidden_size={hidden_size} does not divide by num_attention_heads={num_attention_heads}; "
                "set head_dim to the width of one attention head"
            )
            raise ConfigError(problems)
        width = hidden_size // num_attention_heads if head_dim is None else head_dim
        rotary_ndims = 0 if rotary_pct is None else int(width * rotary_pct)
        if rotary_pct is not None and (rotary_ndims <= 0 or rotary_ndims % 2 or rotary_ndims > width):
            problems.append(
                f"rotary_pct={rotary_pct} of head_dim={width} rotates {rotary_ndims} dimensions; it must be an even "
                f"number from 2 to {width}: change rotary_pct or head_dim"
            )
        if problems:
            raise ConfigError(problems)
        return cls(hidden_size, num_attention_heads, kv_heads, width, rotary_ndims, shared_key_value)

    @property
    def query_hidden_size(self) -> int:
        """n·d: output width of the query projection and input width of the output projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_hidden_size(self) -> int:
        """m·d: output width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_parts(self) -> int:
        """Projections to key/value heads: keys and values, or one for both."""
        return 1 if self.shared_key_value else 2

    @property
    def qkv_parts(self) -> List[int]:
        """Rows for q, k and v (for q and k where keys are values too) in the fused QKV weight."""
        return [self.query_hidden_size] + [self.kv_hidden_size] * self.kv_parts

    @property
    def qkv_hidden_size(self) -> int:
        """(n + 2m)·d: rows of the fused QKV weight."""
        return sum(self.qkv_parts)

    @property
    def queries_per_kv(self) -> int:
        """Query heads served by one key/value head."""
        return self.num_attention_heads // self.num_kv_heads

    @property
    def is_gqa(self) -> bool:
        """Fewer key/value heads than query heads."""
        return self.num_kv_heads < self.num_attention_heads

    @property
    def matches_hidden(self) -> bool:
        """The query width equals hidden_size, as plain GPT-NeoX requires."""
        return self.query_hidden_size == self.hidden_size

    @property
    def qkv_layout(self) -> QKVLayout:
        """The order in which GPT-NeoX stores this geometry's fused QKV rows."""
        return QKVLayout.PER_RANK if self.is_gqa else QKVLayout.PER_HEAD

    @property
    def groups(self) -> Tuple["HeadGeometry", ...]:
        """The groups of heads of one width that the layer is made of: itself."""
        return (self,)

    @property
    def default_softmax_scale(self) -> float:
        """1/sqrt(d), the scale of scaled dot-product attention (Vaswani et al. 2017, eq. 1)."""
        return self.head_dim**-0.5

    def shard_problems(self, model_parallel_size: int) -> List[str]:
        """Why this geometry cannot be split over `model_parallel_size` ranks; empty if it can."""
        problems = []
        if self.num_attention_heads % model_parallel_size:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} does not divide by "
                f"model_parallel_size={model_parallel_size}"
            )
        if self.num_kv_heads % model_parallel_size and model_parallel_size % self.num_kv_heads:
            problems.append(
                f"num_kv_heads={self.num_kv_heads} does not divide by model_parallel_size={model_parallel_size}, nor "
                "the other way round; every rank needs equally many key/value heads, or equally many ranks one head"
            )
        return problems

    def kv_replicas(self, model_parallel_size: int) -> int:
        """How many tensor-parallel ranks compute with the same key/value head: p / m if there are fewer heads than
        ranks, else 1. Neighbours do: rank i has head i // kv_replicas.

        Raises ConfigError if the heads cannot be split evenly.
        """
        self._check_shards(model_parallel_size)
        return max(1, model_parallel_size // self.num_kv_heads)

    def shard(self, model_parallel_size: int) -> "HeadGeometry":
        """One tensor-parallel rank's share: heads are split, hidden_size and head_dim are not.

        With fewer key/value heads than ranks each rank has one whole head, the same as its neighbours: `kv_replicas`.
        Raises ConfigError if the heads cannot be split evenly.
        """
        self._check_shards(model_parallel_size)
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // model_parallel_size,
            num_kv_heads=max(1, self.num_kv_heads // model_parallel_size),
        )

    def _check_shards(self, model_parallel_size: int) -> None:
        problems = self.shard_problems(model_parallel_size)
        if problems:
            raise ConfigError(problems)

    def stamp(self) -> Dict[str, Any]:
        """The record written beside a checkpoint, because shapes cannot tell 8 x 16 from 4 x 32.

        shared_key_value is in it only if it is true: older readers know no such key.
        """
        numbers = asdict(self)
        if not self.shared_key_value:
            del numbers["shared_key_value"]
        return {"version": STAMP_VERSION, **numbers}

    @classmethod
    def from_stamp(cls, stamp: Dict[str, Any]) -> "HeadGeometry":
        """Inverse of `stamp`. Raises ValueError if the record is not one this version can read."""
        if not isinstance(stamp, dict) or stamp.get("version") != STAMP_VERSION:
            raise ValueError(f"not a geometry stamp of version {STAMP_VERSION}: {stamp!r}")
        try:
            return cls(**{key: value for key, value in stamp.items() if key != "version"})
        except TypeError as error:
            raise ValueError(f"not a geometry stamp: {error}") from None

    def differences(self, other: "HeadGeometry") -> List[str]:
        """One line for each number in which the two differ, e.g. 'head_dim: 128 and 64'."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{key}: {mine[key]} and {theirs[key]}" for key in mine if mine[key] != theirs[key]]


@dataclass(frozen=True)
class MLPGeometry:
    """The widths of one MLP: `ffn_hidden_size` is the width of one branch, the input of linear2."""

    hidden_size: int
    ffn_hidden_size: int
    gated: bool

    @classmethod
    def from_config(
        cls,
        hidden_size: int,
        gated: bool,
        ffn_hidden_size: Optional[int] = None,
        intermediate_size: Optional[int] = None,
        expansion_factor: Optional[float] = None,
        mlp_multiple_of: int = 1,
    ) -> "MLPGeometry":
        """`ffn_hidden_size` is exact. Without it GPT-NeoX's rule holds: intermediate_size (or expansion_factor
        times hidden_size, or 4 times) is the width before gating; a gated branch has a third of it. Both are
        rounded up to a multiple of mlp_multiple_of.

        Raises ConfigError if both kinds of width are given.
        """
        if ffn_hidden_size is not None:
            if intermediate_size is not None or expansion_factor is not None:
                raise ConfigError(
                    f"ffn_hidden_size={ffn_hidden_size} is the exact MLP width, so intermediate_size="
                    f"{intermediate_size} and expansion_factor={expansion_factor} must be unset"
                )
            return cls(hidden_size, ffn_hidden_size, gated)
        if intermediate_size is not None:
            width = intermediate_size
        elif expansion_factor is not None:
            width = int(expansion_factor * hidden_size)
        else:
            width = 4 * hidden_size
        # Two truncations, in this order, because existing checkpoints have these widths.
        branch = int(width * 2 / 3) // 2 if gated else width
        return cls(hidden_size, _round_up(branch, mlp_multiple_of), gated)

    @property
    def linear1_width(self) -> int:
        """Rows of linear1: both branches of a gated MLP."""
        return self.ffn_hidden_size * (2 if self.gated else 1)

    def shard_problems(self, model_parallel_size: int) -> List[str]:
        """Why this MLP cannot be split over `model_parallel_size` ranks; empty if it can."""
        if self.ffn_hidden_size % model_parallel_size:
            return [
                f"the MLP width {self.ffn_hidden_size} does not divide by model_parallel_size={model_parallel_size}; "
                "set ffn_hidden_size or mlp_multiple_of so that it does"
            ]
        return []

    def shard(self, model_parallel_size: int) -> "MLPGeometry":
        """One tensor-parallel rank's share. Raises ConfigError if the width cannot be split evenly."""
        problems = self.shard_problems(model_parallel_size)
        if problems:
            raise ConfigError(problems)
        return replace(self, ffn_hidden_size=self.ffn_hidden_size // model_parallel_size)


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, model_parallel_size: int) -> int:
    """Smallest multiple of make_vocab_size_divisible_by * model_parallel_size that holds the vocabulary."""
    return _round_up(vocab_size, make_vocab_size_divisible_by * model_parallel_size)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _positive_int_problems(**settings: Any) -> List[str]:
    """None is left to the caller; bool is an int in Python but never a width."""
    return [
        f"{name}={value!r} must be a positive whole number"
        for name, value in settings.items()
        if value is not None and (type(value) is not int or value <= 0)
    ]
