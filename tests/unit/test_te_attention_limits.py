"""State dicts of Transformer Engine's attention, what is refused with it, and what differs in its versions."""

import importlib
import io
import pickle
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from megatron.errors import BackendError, ConfigError
from megatron.model.attention import KVCache
from megatron.model.attention.cache import layer_cache_bytes
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MHA, WIDE_NON_DIVISIBLE
from tests.helpers.te import install_te, requires_te

pytestmark = requires_te


@pytest.fixture(scope="module", autouse=True)
def transformer_engine():
    install_te()


def _attention(**settings):
    """(args, TE attention of layer 0)"""
    from megatron.model.transformer_engine.attention import TEMultiheadAttention

    args = tiny_args(**settings, te_mha=True)
    return args, TEMultiheadAttention(args)


def _reload(contents):
    file = io.BytesIO()
    torch.save(contents, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_dicts_are_tensors_that_load_without_unpickling():
    (_, engine), (_, other) = _attention(**MHA), _attention(**MHA)
    state = _reload(engine.state_dict())
    extra = sorted(name for name in state if name.endswith("_extra_state"))
    assert extra == ["core_attention._extra_state", "proj._extra_state", "qkv._extra_state"]
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert pickle.loads(state["qkv._extra_state"].numpy().tobytes()) is None  # what TE takes for nothing
    other.load_state_dict(state)
    assert all(torch.equal(other.get_parameter(name), value) for name, value in engine.named_parameters())
    other.load_state_dict({name: value for name, value in state.items() if name not in extra})
    with pytest.raises(RuntimeError, match="proj.weight"):
        other.load_state_dict({name: value for name, value in state.items() if name != "proj.weight"})


def test_a_state_dict_as_gpt_neox_writes_it_loads():
    """There the entries are as Transformer Engine 1.12 makes them."""
    _, engine = _attention(**MHA)
    state = {**engine.state_dict(), "qkv._extra_state": engine.qkv.get_extra_state()}
    assert isinstance(state["qkv._extra_state"], io.BytesIO)
    _attention(**MHA)[1].load_state_dict(state)


def test_fp8_scales_survive_and_a_pickle_is_not_run(monkeypatch):
    from megatron.model.transformer_engine import api, extra_state

    values = {"scale_fwd": torch.arange(3.0), "extra_fp8_variables": {"fp8_max_fwd": 448.0, "fp8_checkpoint": True}}
    raw = io.BytesIO()
    torch.save(values, raw)
    pickled = torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made_by_te in (raw, pickled):
            stored = _reload(extra_state._plain(made_by_te))
            given = pickle.loads(extra_state._for_te(stored, "x").numpy().tobytes())
            assert torch.equal(given["scale_fwd"], values["scale_fwd"])
            assert given["extra_fp8_variables"] == values["extra_fp8_variables"]
    with pytest.warns(UserWarning, match=r"qkv\._extra_state .*it is a pickle"):
        assert extra_state._for_te(pickled, "qkv._extra_state") is None
    monkeypatch.setattr(api, "READS_PICKLED_STATE", False)
    with pytest.warns(UserWarning, match=r"proj\._extra_state"):
        assert extra_state._for_te(stored, "proj._extra_state") is None


# What is refused.

REFUSALS = {
    "alibi": (dict(pos_emb="alibi"), "pos_emb=alibi"),
    "rpe": (dict(pos_emb="rpe"), "pos_emb=rpe"),
    "joint norm": (dict(use_qk_layernorm=True), "use_qk_layernorm=True"),
    "per head norm": (dict(qk_norm_type="per_head"), "qk_norm_type=per_head"),
    "norm of values": (dict(v_norm=True), "v_norm=True"),
    "keys are values": (dict(shared_key_value={"full_attention": True}), "shared_key_value={'full_attention': True}"),
    "kernel": (dict(attention_config=["auto", "flash"]), "attention_config=flash"),
    "layer scaling": (dict(apply_query_key_layer_scaling=True), "apply_query_key_layer_scaling=True"),
    "frequencies": (dict(rotary_save_freqs_buffer=True), "rotary_save_freqs_buffer=True"),
    "cache": (dict(kv_cache_dtype="int8"), "kv_cache_dtype=int8"),
    "shared heads": (dict(model_parallel_size=2, **{**WIDE_NON_DIVISIBLE, "num_kv_heads": 1}), "num_kv_heads=1"),
    "dynamic": (
        dict(rope_scaling=dict(rope_type="dynamic", factor=2.0, original_max_position_embeddings=16)),
        "rope_scaling of type dynamic",
    ),
    "yarn on a part": (
        dict(rotary_pct=0.5, rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)),
        "rotary_pct=1.0, not 0.5",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_combinations_that_are_refused_with_the_config(name):
    settings, message = REFUSALS[name]
    settings = {**WIDE_NON_DIVISIBLE, **settings}
    tiny_args(**settings)
    with pytest.raises(ConfigError) as caught:
        tiny_args(**settings, te_mha=True)
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0] and "te_mha: false" in caught.value.problems[0]


def test_a_soft_cap_depends_on_the_version(monkeypatch):
    from megatron.model.transformer_engine import api, attention

    args = tiny_args(**WIDE_NON_DIVISIBLE, attn_logit_softcap=20.0, te_mha=True)
    with pytest.raises(BackendError, match="attn_logit_softcap=20.0: Transformer Engine 1.12.* has no soft cap"):
        attention.TEMultiheadAttention(args)
    monkeypatch.setattr(api, "accepts", lambda function, keyword: keyword == "softcap")
    arguments = attention._arguments(args, 0, args.head_geometry(0), args.layer_attention(0))
    assert arguments["softcap"] == 20.0


@pytest.mark.parametrize("broken", (None, SimpleNamespace()))
def test_a_missing_or_broken_installation_is_named(broken, monkeypatch):
    name = "megatron.model.transformer_engine.api"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    if broken is None:
        monkeypatch.setitem(sys.modules, "transformer_engine", None)
    else:
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", broken)
    expected = "not installed: pip install" if broken is None else "does not load .*pip install"
    with pytest.raises(BackendError, match=expected):
        importlib.import_module(name)


# The cache of Transformer Engine 2.x, which is told of every step before it.


class _Stepped:
    """What 2.20's InferenceParams does, as far as we rely on it."""

    def __init__(self, max_batch_size, max_sequence_length, num_heads_kv, head_dim_k, dtype, qkv_format):
        assert qkv_format == "sbhd"
        self.shape = (max_batch_size, max_sequence_length, num_heads_kv, head_dim_k)
        self.dtype, self.steps, self.lengths = dtype, [], {}
        self.cu_seqlens_q = self.cu_seqlens_kv = None
        self.cache_manager = SimpleNamespace(cache={})

    def allocate_memory(self, layer_number):
        self.cache_manager.cache[layer_number] = tuple(torch.zeros(self.shape, dtype=self.dtype) for _ in "kv")

    def pre_step(self, step):
        for row, tokens in step.items():  # a row that goes on is counted as one token longer, whatever it is given
            assert row not in self.lengths or tokens == 1
            self.lengths[row] = self.lengths.get(row, 0) + tokens
        self.steps.append(dict(step))

    def reset(self):
        self.lengths = {}


def test_the_stepped_cache_is_fed_as_version_2_wants_it(monkeypatch):
    from megatron.model.transformer_engine import api

    args, engine = _attention(**WIDE_NON_DIVISIBLE)
    monkeypatch.setattr(api, "STEPPED_INFERENCE", True)
    monkeypatch.setattr(api, "InferenceParams", _Stepped)
    calls = []

    def forward(self, hidden_states, rotary_pos_emb, **step):
        calls.append((hidden_states.shape[0], step["attn_mask_type"], step["max_seqlen_q"], step["max_seqlen_kv"]))
        assert rotary_pos_emb.shape == (32, 1, 1, 24)
        return 2 * hidden_states, None

    monkeypatch.setattr(api.MultiheadAttention, "forward", forward)
    caches = KVCache(args, [0], batch_size=2, max_tokens=20)
    assert caches.nbytes == layer_cache_bytes(args, 0, 1, 2, 20)
    hidden = torch.randn(11, 2, args.hidden_size)
    for _ in range(2):
        output = torch.cat([engine(piece, caches[0])[0] for piece in hidden.split((7, 1, 3))])
        assert torch.equal(output, 2 * hidden) and caches.length == 11
        assert calls == [(7, "padding_causal", 7, 20)] + [(1, "padding_causal", 1, 20)] * 4
        assert caches[0]._params.lengths == {0: 11, 1: 11}
        calls.clear()
        caches.reset()
