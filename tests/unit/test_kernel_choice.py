"""Which kernel runs a layer: what each refuses, what an explicit choice answers, what auto takes and says."""

import dataclasses

import pytest
import torch

from megatron.errors import BackendError, ConfigError
from megatron.geometry import HeadGeometry
from megatron.model.attention import ParallelSelfAttention, core
from megatron.model.attention.core import AttentionRequest, chunked, eager, flash, flash_package, select_kernel
from tests.helpers.attention_reference import core_reference
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MHA, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, assert_close

NAMES = {eager: "global", flash: "flash", chunked: "chunked"}
ALIBI = dict(score_bias="pos_emb=alibi")


@pytest.fixture
def without_package(monkeypatch):
    monkeypatch.setattr(flash_package, "is_usable", lambda device, dtype: False)


def _request(head_dim=64, dtype=torch.float32, device="cpu", **settings):
    return AttentionRequest(HeadGeometry(64, 2, 2, head_dim), dtype, torch.device(device), **settings)


@pytest.mark.parametrize(
    "head_dim, dtype, device, settings, named",
    [
        (64, torch.float32, "cpu", dict(dropout_p=0.1), "attention_dropout=0.1"),
        (64, torch.float32, "cpu", ALIBI, "pos_emb=alibi"),
        (64, torch.float32, "cpu", dict(softcap=50.0), "attn_logit_softcap=50"),
        (64, torch.bfloat16, "cuda", dict(score_bias="pos_emb=rpe"), "pos_emb=rpe"),
        (64, torch.bfloat16, "cuda", dict(softcap=50.0), "attn_logit_softcap=50"),
        (64, torch.float32, "cuda", {}, "precision=fp32: .* fp16 and bfloat16"),
        (264, torch.bfloat16, "cuda", {}, "head_dim=264: .* 256"),
        (64, torch.bfloat16, "cuda", dict(window=8), "sliding_window_width=8.*flash-attn"),
    ],
)
def test_an_explicit_flash_that_cannot_run_names_why_and_what_can(
    without_package, head_dim, dtype, device, settings, named
):
    request = _request(head_dim, dtype, device, **settings)
    with pytest.raises(BackendError, match=f"attention_config=flash cannot run this model: {named}") as error:
        select_kernel("flash", request)
    alternatives = str(error.value).split("use attention_config=")[1].split(" or ")
    for kind in alternatives:
        assert select_kernel(kind, request).refusal(request) is None
    assert alternatives == (["global"] if "score_bias" in settings else ["chunked", "global"])


@pytest.mark.parametrize(
    "head_dim, dtype, device, settings",
    [
        (12, torch.float32, "cpu", dict(window=8)),
        (512, torch.bfloat16, "cpu", {}),
        (256, torch.bfloat16, "cuda", dict(dropout_p=0.1)),
    ],
)
def test_flash_accepts(without_package, head_dim, dtype, device, settings):
    assert flash.refusal(_request(head_dim, dtype, device, **settings)) is None


def test_flash_attn_takes_windows_and_soft_caps_up_to_its_limits(monkeypatch):
    monkeypatch.setattr(flash_package, "is_usable", lambda device, dtype: torch.device(device).type == "cuda")
    half = dict(dtype=torch.bfloat16, device="cuda")
    assert flash.refusal(_request(**half, window=8, softcap=30.0)) is None
    assert flash.refusal(_request(**half, dropout_p=0.1)) is None
    assert "head_dim=264" in flash.refusal(_request(264, **half, softcap=30.0))
    assert "attention_dropout=0.1" in flash.refusal(_request(**half, softcap=30.0, dropout_p=0.1))
    assert "pos_emb=alibi" in flash.refusal(_request(**half, **ALIBI))


def test_the_soft_cap_reaches_flash_attn(monkeypatch):
    seen = {}

    def attend(q, k, v, **options):
        seen.update(options, shapes=(q.shape, k.shape))
        return q

    monkeypatch.setattr(flash_package, "is_usable", lambda device, dtype: True)
    monkeypatch.setattr(flash_package, "attend", attend)
    q, k = torch.randn(4, 1, 6, 20), torch.randn(9, 1, 2, 20)
    output = flash.attend(q, k, k, scale=0.3, causal_offset=5, window=2, softcap=30.0)
    assert torch.equal(output, q)
    # Three keys before the window are cut off, the width is padded to a multiple of 8, the scale is not changed.
    wanted = dict(scale=0.3, causal_offset=2, window=2, softcap=30.0, dropout_p=0.0)
    assert seen == {**wanted, "shapes": ((1, 4, 6, 24), (1, 6, 2, 24))}


def test_what_flash_refuses_at_construction_it_refuses_when_called():
    q = torch.randn(3, 1, 1, 8)
    common = dict(scale=1.0, causal_offset=0)
    for options, named in (
        (dict(bias=torch.zeros(1, 3, 3)), "attention_config=global"),
        (dict(softcap=30.0), "attn_logit_softcap=30.0.*attention_config=chunked"),
        (dict(dropout_p=0.5, training=True), "attention_dropout=0.5.*attention_config=chunked"),
    ):
        with pytest.raises(BackendError, match=named):
            flash.attend(q, q, q, **common, **options)


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_chunked_refuses_a_score_bias_and_global_nothing(device):
    everything = dict(window=3, softcap=30.0, dropout_p=0.1)
    for head_dim, dtype in ((8, torch.float32), (320, torch.float16)):
        assert chunked.refusal(_request(head_dim, dtype, device, **everything)) is None
        assert eager.refusal(_request(head_dim, dtype, device, **everything, **ALIBI)) is None
    with pytest.raises(BackendError, match="chunked cannot run this model: pos_emb=alibi.*attention_config=global$"):
        select_kernel("chunked", _request(device=device, **ALIBI))


def test_unknown_kinds_are_refused_with_the_known_ones():
    with pytest.raises(BackendError, match="attention_config=local is not built; choose one of global, flash, chunked"):
        select_kernel("local", _request())


# The default


@pytest.mark.parametrize(
    "request_, taken",
    [
        (_request(), "chunked"),
        (_request(320, torch.bfloat16, window=8, softcap=30.0, dropout_p=0.1), "chunked"),
        (_request(**ALIBI), "global"),
        (_request(64, torch.bfloat16, "cuda"), "flash"),
        (_request(64, torch.float16, "cuda", dropout_p=0.1), "flash"),
        (_request(64, torch.float32, "cuda"), "chunked"),
        (_request(320, torch.bfloat16, "cuda"), "chunked"),
        (_request(64, torch.bfloat16, "cuda", window=8), "chunked"),
        (_request(64, torch.bfloat16, "cuda", softcap=30.0), "chunked"),
        (_request(64, torch.bfloat16, "cuda", **ALIBI), "global"),
    ],
)
def test_auto_takes_the_first_that_can(without_package, request_, taken):
    assert NAMES[select_kernel("auto", request_)] == taken


def test_auto_says_once_what_it_took_and_what_it_passed_over(without_package, capsys):
    core._say_once.cache_clear()
    for _ in range(3):
        select_kernel("auto", _request(64, torch.float32, "cuda"))
        select_kernel("auto", _request())
    select_kernel("flash", _request())  # a choice of the user's needs no word
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("> attention kernel: chunked") and "not flash: precision=fp32" in lines[0]
    assert lines[1].startswith("> attention kernel: chunked") and "the fastest on cpu" in lines[1]


def test_only_the_first_rank_speaks(monkeypatch, capsys):
    core._say_once.cache_clear()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *a: 1)
    select_kernel("auto", _request())
    core._say_once.cache_clear()
    assert capsys.readouterr().out == ""


def test_no_attention_config_means_auto_in_every_layer(capsys):
    core._say_once.cache_clear()
    args = tiny_args(**WIDE_NON_DIVISIBLE)
    layers = [ParallelSelfAttention(args, layer_number=number) for number in range(2)]
    assert all(layer.kernel is chunked for layer in layers)
    assert capsys.readouterr().out.count("attention kernel") == 1
    args = tiny_args(**WIDE_NON_DIVISIBLE, attention_config=[[["global", "flash"], "all"]])
    assert [ParallelSelfAttention(args, layer_number=number).kernel for number in range(2)] == [eager, flash]


def test_layers_of_different_windows_answer_for_themselves(without_package):
    args = tiny_args(**MHA, layer_types=["sliding_attention", "full_attention"], sliding_window_width=5)
    partition = args.head_geometry().shard(1)
    requests = [AttentionRequest.of_layer(args, number, partition, torch.device("cuda")) for number in range(2)]
    taken = [select_kernel("auto", dataclasses.replace(request, dtype=torch.bfloat16)) for request in requests]
    assert taken == [chunked, flash]


def test_dropout_of_a_model_that_is_not_trained_is_not_asked_for():
    for optimizer, dropout_p in ((None, 0.0), ({"type": "adam", "params": {}}, 0.1)):
        args = tiny_args(**MHA, attention_dropout=0.1, optimizer=optimizer)
        request = AttentionRequest.of_layer(args, 1, args.head_geometry(1), torch.device("cpu"))
        assert request.dropout_p == dropout_p


def test_a_model_with_an_explicit_kind_that_cannot_run_is_not_built():
    with pytest.raises(BackendError, match="attention_dropout=0.1.*attention_config=chunked"):
        ParallelSelfAttention(tiny_args(**MHA, attention_config=["flash"] * 2, attention_dropout=0.1))


@pytest.mark.parametrize("kind", ("flash", "chunked"))
@pytest.mark.parametrize("pos_emb", ("alibi", "rpe"))
def test_the_config_refuses_the_biases_that_these_kernels_refuse(kind, pos_emb):
    with pytest.raises(ConfigError, match=f"pos_emb={pos_emb}.*{kind}.*attention_config global"):
        tiny_args(**MHA, pos_emb=pos_emb, attention_config=[kind, "global"])
    with pytest.raises(BackendError):
        select_kernel(kind, _request(score_bias=f"pos_emb={pos_emb}"))
    assert select_kernel("auto", _request(score_bias=f"pos_emb={pos_emb}")) is eager


# The soft cap, in every kernel that takes one


@pytest.mark.parametrize("kind", ("global", "chunked", "auto"))
def test_attn_logit_softcap_reaches_the_kernel(kind):
    """Gemma 2's order: scale, cap, mask, softmax; and Hugging Face's own function."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    args = tiny_args(**WIDE_NON_DIVISIBLE, attention_config=[kind] * 2, attn_logit_softcap=1.5, softmax_scale=0.9)
    attention = ParallelSelfAttention(args, layer_number=1)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(13, 2, heads, 24, generator=generator, dtype=torch.float64) for heads in (6, 2, 2))
    got = attention._attend(q.float(), k.float(), v.float(), oldest_key=0)

    module = torch.nn.Module()
    module.num_key_value_groups = 3
    mask = torch.full((1, 1, 13, 13), -torch.inf, dtype=torch.float64).triu(1)
    heads_first = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    wanted, _ = eager_attention_forward(module, *heads_first, mask, scaling=0.9, softcap=1.5)
    assert_close(got, wanted.transpose(0, 1), FORWARD)
    uncapped = core_reference(q, k, v, 0.9)
    assert (got - uncapped).abs().max() > 0.1, "the cap acts"


def test_each_layer_is_asked_for_its_own_width(without_package):
    """By default the wide layers fall back, with a word about it; an explicit choice names the layer."""
    widths = dict(hidden_size=64, num_attention_heads=2, head_dim=[[64, 2], [264, 1]])
    args = tiny_args(**widths, num_layers=3, precision="bfloat16")
    cuda = torch.device("cuda")
    requests = [AttentionRequest.of_layer(args, number, args.head_geometry(number), cuda) for number in range(3)]
    assert [select_kernel("auto", request) for request in requests] == [flash, flash, chunked]
    assert select_kernel("flash", requests[1]) is flash
    with pytest.raises(BackendError, match="attention_config=flash cannot run layer 2: head_dim=264"):
        select_kernel("flash", requests[2])
    uniform = tiny_args(**{**widths, "head_dim": [[264, 3]]}, num_layers=3)
    with pytest.raises(BackendError, match="cannot run this model: "):
        select_kernel("flash", AttentionRequest.of_layer(uniform, 2, uniform.head_geometry(2), cuda))
