"""The widths of layers whose heads are not all alike, beside those of megatron/geometry.py."""

from dataclasses import dataclass
from typing import List, Tuple, Union

from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry


@dataclass(frozen=True)
class MixedHeadGeometry:
    """The widths of a layer whose heads are of several widths: groups of heads, each as in a layer of its own.

    The groups follow each other in the rows of the fused QKV weight and in the columns of the output projection. There
    is no head_dim, rotary_ndims or softmax scale of the layer, so code that assumes one fails: ask the groups.
    """

    groups: Tuple[HeadGeometry, ...]

    @property
    def hidden_size(self) -> int:
        """h, the same for all groups."""
        return self.groups[0].hidden_size

    @property
    def num_attention_heads(self) -> int:
        """Query heads of all groups."""
        return sum(group.num_attention_heads for group in self.groups)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of all groups."""
        return sum(group.num_kv_heads for group in self.groups)

    @property
    def query_hidden_size(self) -> int:
        """Output width of the query projections and input width of the output projection."""
        return sum(group.query_hidden_size for group in self.groups)

    @property
    def kv_hidden_size(self) -> int:
        """Output width of the key projections, and of the value projections."""
        return sum(group.kv_hidden_size for group in self.groups)

    @property
    def qkv_hidden_size(self) -> int:
        """Rows of the fused QKV weight."""
        return sum(group.qkv_hidden_size for group in self.groups)

    @property
    def is_gqa(self) -> bool:
        """Fewer key/value heads than query heads."""
        return self.num_kv_heads < self.num_attention_heads

    @property
    def matches_hidden(self) -> bool:
        """The query width equals hidden_size."""
        return self.query_hidden_size == self.hidden_size

    def shard_problems(self, model_parallel_size: int) -> List[str]:
        """Why the groups cannot be split over `model_parallel_size` ranks, each evenly; empty if they can."""
        return [
            f"group of head_dim {group.head_dim}: {problem}"
            for group in self.groups
            for problem in group.shard_problems(model_parallel_size)
        ]

    def shard(self, model_parallel_size: int) -> "MixedHeadGeometry":
        """One tensor-parallel rank's share: that of each group. Raises ConfigError with the problems of all groups."""
        problems = self.shard_problems(model_parallel_size)
        if problems:
            raise ConfigError(problems)
        return MixedHeadGeometry(tuple(group.shard(model_parallel_size) for group in self.groups))


AnyHeadGeometry = Union[HeadGeometry, MixedHeadGeometry]
"""Of a layer: heads of one width, or of several. Both have `groups`."""
