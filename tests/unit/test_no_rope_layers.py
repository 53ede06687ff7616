"""no_rope_layers: which layers rotate queries and keys. tests/parity/test_convert_llama_like.py compares SmolLM3."""

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.attention import ParallelSelfAttention
from megatron.model.gpt2_model import GPT2ModelSequential
from megatron.text_generation.runner import InferenceRunner
from tests.helpers.attention_reference import AttentionFunction, value_and_gradients
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, WIDE_NON_DIVISIBLE
from tests.helpers.te import install_te, requires_te
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

TOKENS = 9


def _args(geometry=WIDE_NON_DIVISIBLE, **settings):
    return tiny_args(**{"no_rope_layers": [1, 0], **geometry, **settings}, seq_length=TOKENS)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layer", (0, 1))
def test_against_the_reference(name, layer):
    """Output and gradients of a layer with rotary positions, and of one without."""
    args = _args(ALL[name])
    attention = ParallelSelfAttention(args, layer)
    geometry = args.head_geometry()
    rotated = geometry.rotary_ndims if layer == 0 else 0
    assert attention.rotary_ndims == rotated and (attention.rotary_emb is None) == (layer == 1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    hidden = torch.randn(TOKENS, 2, geometry.hidden_size, generator=generator, requires_grad=True)
    upstream = torch.randn(TOKENS, 2, geometry.hidden_size, generator=generator) / 4
    parameters = dict(attention.named_parameters())
    widths = geometry.num_attention_heads, geometry.num_kv_heads, geometry.head_dim
    expected, gradients = value_and_gradients(
        {key: p.detach() for key, p in parameters.items()},
        hidden.detach(),
        AttentionFunction(*widths, rotated),
        upstream,
    )
    output, bias = attention(hidden)
    output = output + bias
    assert_close(output, expected.float(), FORWARD)
    output.backward(upstream)
    for key, tensor in {**parameters, "input": hidden}.items():
        assert_close(tensor.grad, gradients[key].float(), GRADIENT, key)


def test_without_positions_the_order_of_keys_does_not_matter():
    """The last token's output, with the tokens before it in another order: the same only where nothing is rotated."""
    args = _args()
    hidden = torch.randn(TOKENS, 1, args.hidden_size, generator=torch.Generator().manual_seed(3))
    shuffled = torch.cat([hidden[:-1].flip(0), hidden[-1:]])
    apart = []
    for layer in (0, 1):
        attention = ParallelSelfAttention(args, layer)
        one, other = (attention(x)[0][-1] for x in (hidden, shuffled))
        apart.append((one - other).abs().max().item())
    assert apart[1] < FORWARD[torch.float32] < 1e-4 < apart[0], apart


def test_decoding_with_the_cache():
    args = _args(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4})
    model = GPT2ModelSequential(args).eval()
    tokens = torch.randint(0, 128, (2, TOKENS), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(TOKENS).expand(2, -1)
    with torch.no_grad():
        whole = model((tokens, positions))
    runner = InferenceRunner(args, model)
    runner.start(batch_size=2, max_tokens=TOKENS)
    for start, end in ((0, 4), *((i, i + 1) for i in range(4, TOKENS))):
        mine = runner.next_token_logits(tokens[:, start:end], positions[:, start:end])
        assert_close(mine, whole[:, end - 1], FORWARD, f"logits after token {end}")


@requires_te
def test_transformer_engine_rotates_the_same_layers():
    install_te()
    from megatron.model.transformer_engine import TEMultiheadAttention

    tables = [TEMultiheadAttention(_args(te_mha=True), layer)._angles for layer in (0, 1)]
    assert tables[0] is not None and tables[1] is None


WRONG = {
    "too few": ([1], "no_rope_layers has 1 entries and num_layers=2"),
    "too many": ([1, 0, 1], "no_rope_layers has 3 entries and num_layers=2"),
    "not a flag": ([1, 2], r"no_rope_layers=\[1, 2\] must be a list of 1"),
    "not a number": (["no", "yes"], "must be a list of 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists(case):
    flags, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        _args(no_rope_layers=flags)


@pytest.mark.parametrize("pos_emb", ("learned", "alibi", "none"))
def test_only_with_rotary_positions(pos_emb):
    with pytest.raises(ConfigError, match=f"no_rope_layers.*only used with pos_emb=rotary, not {pos_emb}"):
        _args(pos_emb=pos_emb)


def test_booleans_are_flags():
    args = _args(no_rope_layers=[True, False])
    assert [args.layer_attention(number).rotary is None for number in (0, 1)] == [False, True]
