"""Whole models of published families compute and learn as Hugging Face's do, from the same random weights.

Texts are longer than the window, and than the length that rotary scaling starts from.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from megatron.errors import BackendError
from megatron.model.attention.core import KERNELS
from megatron.model.gpt2_model import GPT2ModelSequential, cross_entropy
from megatron.text_generation.runner import InferenceRunner
from tests.helpers.configs import tiny_args
from tests.helpers.hf_models import FAMILIES, SEQ, VOCAB, WINDOW, our_tensors
from tests.helpers.tolerances import FORWARD, GRADIENT, LOSS, assert_close

TOKENS = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(7))
POSITIONS = torch.arange(SEQ).expand(2, -1)


@functools.cache
def _theirs(name):
    """(family, logits, loss, gradients by our names), computed once."""
    family = FAMILIES[name]()
    logits = family.hf(input_ids=TOKENS).logits
    loss = F.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten())
    loss.backward()
    gradients = our_tensors(family, {key: p.grad for key, p in family.hf.named_parameters()})
    return family, logits.detach(), loss.item(), gradients


def _ours(family, kind="global", **changes):
    settings = {**family.settings, **changes}
    args = tiny_args(**settings, seq_length=SEQ, attention_config=[kind] * settings["num_layers"])
    model = GPT2ModelSequential(args)
    weights = our_tensors(family, {key: p.detach() for key, p in family.hf.named_parameters()})
    model.load_state_dict(weights, strict=True)
    return args, model


@pytest.mark.parametrize("kind", (*KERNELS, "auto"))
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients(name, kind):
    family, logits, loss, gradients = _theirs(name)
    if kind == "flash" and family.settings.get("attn_logit_softcap"):
        with pytest.raises(BackendError, match="attn_logit_softcap"):
            _ours(family, kind)
        return
    args, model = _ours(family, kind)
    mine = model((TOKENS, POSITIONS))
    my_loss = cross_entropy(args)(mine, (TOKENS.roll(-1, 1), torch.ones(2, SEQ)))
    my_loss.backward()

    assert logits.abs().max() > 1, "the comparison would see nothing"
    assert_close(mine, logits, FORWARD, "logits")
    assert abs(my_loss.item() - loss) <= LOSS
    for key, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[key], GRADIENT, key)
        assert gradients[key].abs().max() > 10 * GRADIENT[torch.float32], f"{key}: nothing to compare"


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_accurate_as_theirs(name):
    """Mean distance to the fp32 logits: rounding happens where theirs does, or later."""
    logits = _theirs(name)[1]
    family = FAMILIES[name]()
    _, model = _ours(family, precision="bfloat16")
    with torch.no_grad():
        ours = (model((TOKENS, POSITIONS)).float() - logits).abs().mean().item()
        theirs = (family.hf.bfloat16()(input_ids=TOKENS).logits.float() - logits).abs().mean().item()
    assert 0 < ours <= 1.25 * theirs, f"{ours:.3g}, theirs {theirs:.3g}"


@pytest.mark.parametrize("name", FAMILIES)
def test_no_setting_is_idle(name):
    """Without any one of its settings a family's model is another one, so the comparison above sees each."""
    family, logits, _, _ = _theirs(name)
    without = {key: None for key in family.essential}
    without.update(activation="geglu", zero_centered_gamma=False, norm_placement="pre", add_qkv_bias=False)
    without.update(rotary_emb_base=10000)
    for key in family.essential:
        try:
            apart = _apart(family, logits, **{key: without[key]})
        except RuntimeError as error:
            assert "loading state_dict" in str(error)  # other parameters
            continue
        assert apart > 20 * FORWARD[torch.float32], f"{key}: {apart:.2g}"


def _apart(family, logits, **changes):
    _, model = _ours(family, **changes)
    with torch.no_grad():
        return (model((TOKENS, POSITIONS)) - logits).abs().max().item()


def test_near_misses_are_seen():
    """Windows that are one token off, and what is easily taken for something else."""
    sliding, full = "sliding_attention", "full_attention"
    bases, scaling = FAMILIES["gemma3"]().settings["rotary_emb_base"], FAMILIES["phi3"]().settings["rope_scaling"]
    misses = [
        ("mistral", dict(sliding_window_width=WINDOW)),
        ("mistral", dict(sliding_window_width=WINDOW - 2)),
        ("gemma2", dict(layer_types=[[[full, sliding], "all"]])),
        ("gemma2", dict(softmax_scale=5.0**-1)),
        ("gemma3", dict(layer_types=[[[full] + [sliding] * 5, "all"]])),
        ("gemma3", dict(rotary_emb_base={full: bases[sliding], sliding: bases[full]})),
        ("phi3", dict(rope_scaling={**scaling, "long_factor": scaling["short_factor"]})),
    ]
    for name, changes in misses:
        family, logits, _, _ = _theirs(name)
        apart = _apart(family, logits, **changes)
        assert apart > 20 * FORWARD[torch.float32], f"{name} {changes}: {apart:.2g}"


@pytest.mark.parametrize("name", ("mistral", "gemma2", "gemma3"))
@pytest.mark.parametrize("prefill", (1, 4, 12))
def test_decoding_with_the_cache(name, prefill):
    """Prompts shorter and longer than the window, then token by token: their whole-text logits at each position."""
    family, logits, _, _ = _theirs(name)
    args, model = _ours(family)
    runner = InferenceRunner(args, model)
    runner.start(batch_size=2, max_tokens=SEQ)
    start = 0
    for end in (prefill, *range(prefill + 1, SEQ + 1)):
        mine = runner.next_token_logits(TOKENS[:, start:end], POSITIONS[:, start:end])
        assert_close(mine, logits[:, end - 1], FORWARD, f"logits after token {end}")
        start = end
