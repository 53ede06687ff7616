"""Token and position embeddings on one process."""

import math

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.init_functions import get_init_methods
from megatron.model.word_embeddings import EmbeddingPipe
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MHA, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import assert_close

TOKENS = torch.tensor([[3, 127, 0, 3], [9, 9, 64, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 31]])


def _embedding(**settings):
    widths = {} if "hidden_size" in settings else WIDE_NON_DIVISIBLE
    neox_args = tiny_args(**widths, **settings)
    return EmbeddingPipe(neox_args, get_init_methods(neox_args)[0])


def test_names_and_shapes():
    learned = _embedding(pos_emb="learned", max_position_embeddings=48)
    shapes = {name: tuple(value.shape) for name, value in learned.state_dict().items()}
    assert shapes == {"word_embeddings.weight": (128, 80), "position_embeddings.weight": (48, 80)}
    assert list(_embedding(pos_emb="sinusoidal").state_dict()) == [
        "word_embeddings.weight",
        "position_embeddings.inv_freq",
    ]
    for pos_emb in ("rotary", "alibi", "rpe", "none"):
        assert list(_embedding(pos_emb=pos_emb).state_dict()) == ["word_embeddings.weight"]


def test_tokens_alone():
    embedding = _embedding()
    assert torch.equal(embedding((TOKENS, POSITIONS)), embedding.word_embeddings.weight[TOKENS])


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions(offset):
    embedding = _embedding(pos_emb="learned", opt_pos_emb_offset=offset, max_position_embeddings=32 + offset)
    weight = embedding.position_embeddings.weight
    expected = embedding.word_embeddings.weight[TOKENS] + weight[POSITIONS + offset]
    assert torch.equal(embedding((TOKENS, POSITIONS)), expected)


def test_a_position_table_too_small_for_the_offset():
    with pytest.raises(ConfigError, match="max_position_embeddings=32 .*opt_pos_emb_offset=2.*34"):
        _embedding(pos_emb="learned", opt_pos_emb_offset=2)


@pytest.mark.parametrize("widths", [WIDE_NON_DIVISIBLE, MHA, dict(MHA, hidden_size=57)], ids=["even", "56", "odd"])
def test_sinusoidal_positions(widths):
    embedding = _embedding(pos_emb="sinusoidal", **widths)
    hidden = widths["hidden_size"]
    half = -(-hidden // 2)
    for row, column in ((0, 3), (1, 0), (1, 3)):
        position = POSITIONS[row, column].item()
        angles = [position / 10000 ** (2 * k / hidden) for k in range(half)]
        table = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        expected = embedding.word_embeddings.weight[TOKENS[row, column]] + torch.tensor(table[:hidden])
        assert_close(embedding((TOKENS, POSITIONS))[row, column], expected, what=f"position {position}")


def test_half_precision_comes_out_in_half_precision():
    for pos_emb in ("learned", "sinusoidal", "rotary"):
        embedding = _embedding(pos_emb=pos_emb, precision="bfloat16")
        assert embedding((TOKENS, POSITIONS)).dtype == torch.bfloat16


def test_dropout_in_training_only():
    embedding = _embedding(hidden_dropout=0.25)
    whole = embedding.word_embeddings.weight[TOKENS]
    torch.manual_seed(1)
    output = embedding((TOKENS, POSITIONS))
    dropped = output == 0
    assert 0.15 < dropped.float().mean() < 0.35
    assert_close(output[~dropped], whole[~dropped] / 0.75)
    assert torch.equal(embedding.eval()((TOKENS, POSITIONS)), whole)


def test_half_precision_does_not_move_sinusoidal_positions():
    """DeepSpeed casts the whole module, buffers included; position 2000 must stay where it is."""
    embedding = _embedding(pos_emb="sinusoidal").position_embeddings
    positions = torch.tensor([[0, 1000, 2000]])
    before = embedding(positions)
    assert torch.equal(embedding.to(torch.bfloat16)(positions), before)
