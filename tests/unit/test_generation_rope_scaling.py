"""Generation beyond the original length of a rope_scaling."""

import pytest

from megatron.model.gpt2_model import build_model
from megatron.text_generation import InferenceRunner, stream_tokens
from tests.helpers.geometries import NARROW
from tests.helpers.tolerances import assert_close
from tests.unit.test_generation_model import NO_EOS, generation_args

ORIGINAL = dict(original_max_position_embeddings=14)
PROMPTS = [[17, 5, 99, 64, 2, 8, 31, 31, 7], [3, 3, 64, 21, 8, 110, 2, 45, 90, 6, 12]]


@pytest.mark.parametrize(
    "scaling",
    [
        dict(rope_type="default"),
        dict(rope_type="linear", factor=2),
        dict(rope_type="llama3", factor=2, low_freq_factor=1, high_freq_factor=4, **ORIGINAL),
        dict(rope_type="yarn", factor=2, **ORIGINAL),
        dict(rope_type="longrope", short_factor=[1.0] * 12, long_factor=[3.0] * 12, **ORIGINAL),
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_a_cache_gives_the_logits_of_the_whole_text(scaling):
    """Also where longrope begins to rotate all keys otherwise."""
    args = generation_args(**NARROW, pos_emb="rotary", rope_scaling=scaling, return_logits=True)
    runner = InferenceRunner(args, build_model(args))
    cached, whole = (
        list(stream_tokens(args, runner, PROMPTS, eos_token_id=NO_EOS, maximum_tokens=12, recompute=recompute))[-1]
        for recompute in (False, True)
    )
    assert cached.tokens.equal(whole.tokens)
    size = whole.logits.abs().max()
    assert_close(cached.logits / size, whole.logits / size)
