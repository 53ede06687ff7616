"""Which rows of a QKV weight each rank has when ranks share key/value heads, stated row by row."""

import pytest
import torch

from megatron.checkpointing.shards import Shards
from megatron.errors import CheckpointError
from tests.helpers.configs import tiny_args

QKV, K_NORM = "attention.query_key_value.weight", "attention.k_layernorm.scale"
LAYER = 2
CASES = [(8, 2, 6, 4), (4, 1, 10, 4), (5, 1, 12, 5), (12, 2, 7, 4), (6, 3, 5, 6), (4, 2, 8, 2), (12, 4, 10, 2)]
"""Query heads, key/value heads, head_dim, ranks; the last two without sharing."""


def shards_of(heads, kv_heads, width, **more):
    return Shards(
        tiny_args(
            hidden_size=24, num_attention_heads=heads, num_kv_heads=kv_heads, head_dim=width, pos_emb="none",
            norm="rmsnorm", qk_norm_type="full_width", **more,
        )
    )  # fmt: skip


def numbered_rows(count):
    return torch.arange(count).unsqueeze(1).expand(count, 3).contiguous()


@pytest.mark.parametrize("heads, kv_heads, width, ranks", CASES)
def test_each_row_has_one_owner_who_shares_its_head(heads, kv_heads, width, ranks):
    shards = shards_of(heads, kv_heads, width)
    whole = numbered_rows((heads + 2 * kv_heads) * width)
    pieces = shards.split(LAYER, QKV, whole, ranks)
    assert torch.equal(shards.join(LAYER, QKV, pieces), whole)
    assert sorted(torch.cat(pieces)[:, 0].tolist()) == whole[:, 0].tolist()
    norm = numbered_rows(kv_heads * width)[:, 0]
    norm_pieces = shards.split(LAYER, K_NORM, norm, ranks)
    assert torch.equal(shards.join(LAYER, K_NORM, norm_pieces), norm)
    own_queries = heads // ranks
    for rank, piece in enumerate(pieces):
        rows = piece[:, 0].tolist()
        queries, keys = rows[: own_queries * width], rows[own_queries * width : (len(rows) + own_queries * width) // 2]
        values = rows[len(queries) + len(keys) :]
        assert queries == list(range(rank * own_queries * width, (rank + 1) * own_queries * width))
        assert [row - heads * width for row in keys] == [row - (heads + kv_heads) * width for row in values]
        assert [row - heads * width for row in keys] == norm_pieces[rank].tolist()
        # The heads that these rows are of are those that the rank's query heads attend with.
        attended = {query * kv_heads // heads for query in range(rank * own_queries, (rank + 1) * own_queries)}
        assert {(row - heads * width) // width for row in keys} == attended
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 2, "as even as whole rows of keys and of values allow"


def test_shards_that_do_not_fit_are_refused():
    shards = shards_of(12, 4, 10)
    with pytest.raises(CheckpointError, match=r"layer 2 .*num_kv_heads=4 .* model_parallel_size=6"):
        shards.piece(LAYER, QKV, numbered_rows(200), 0, 6)
    with pytest.raises(CheckpointError, match=r"layer 2 .*num_kv_heads=4 .* model_parallel_size=6"):
        shards.piece(LAYER, K_NORM, torch.ones(40), 0, 6)
    shards = shards_of(4, 1, 5)  # at 2 ranks 10 rows of queries each; of keys and of values 2 and 3
    pieces = shards.split(LAYER, QKV, numbered_rows(30), 2)
    assert [len(piece) for piece in pieces] == [14, 16]
    for wrong in (pieces[::-1], [numbered_rows(15)] * 2, [pieces[0], pieces[1].half()], [pieces[0], pieces[1][:, :2]]):
        with pytest.raises(CheckpointError, match="different shapes or dtypes"):
            shards.join(LAYER, QKV, wrong)
    with pytest.raises(CheckpointError, match="28 rows over all ranks in the checkpoint, 30 by the config"):
        shards.join(LAYER, QKV, [numbered_rows(14)] * 2)
