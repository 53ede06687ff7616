"""FP8: the recipe that the te_fp8_ settings describe, where it is in force, and what is refused.

No device here has FP8, so its arithmetic is not run: Transformer Engine's own state says what it would compute in FP8.
"""

import pytest
import torch

from megatron.errors import BackendError, ConfigError
from megatron.model.gpt2_model import build_model
from megatron.neox_arguments import NeoXArgs, command_line
from tests.helpers.configs import tiny_args, tiny_values
from tests.helpers.model_runs import batch
from tests.helpers.te import install_te, requires_te

pytestmark = [requires_te, pytest.mark.filterwarnings("ignore:.*cuda.amp.autocast:FutureWarning")]

FP8 = dict(
    te_fp8_mha=True, precision="bfloat16", hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=24,
    seq_length=16, max_position_embeddings=16,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def transformer_engine():
    install_te()


@pytest.fixture
def state():
    """TE's global state of FP8, as it was afterwards: an autocast that is refused leaves it on in TE 1.12."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    yield FP8GlobalStateManager
    FP8GlobalStateManager.reset()


@pytest.fixture
def with_fp8(state, monkeypatch):
    monkeypatch.setattr(state, "is_fp8_available", classmethod(lambda cls: (True, "")))
    return state


def _args(**settings):
    return tiny_args(**{**FP8, **settings})


RECIPES = {
    # setting: (value, field of TE's recipe, expected value; another value of the setting, what it gives)
    "te_fp8_margin": (0, "margin", 0, 3, 3),
    "te_fp8_amax_history_len": (1, "amax_history_len", 1, 16, 16),
    "te_fp8_amax_compute_algo": ("most_recent", "amax_compute_algo", "most_recent", "max", "max"),
    "te_fp8_wgrad": (True, "override_linear_precision", (False, False, False), False, (False, False, True)),
    "te_fp8_format": ("hybrid", "fp8_format", (448, 57344), "E4M3", (448, 448)),
}
"""448 and 57344 are the largest numbers of e4m3 and e5m2 (OCP 8-bit floating point, 2023): forward, backward."""


def _field(recipe, name):
    value = getattr(recipe, name)
    return (value.value.max_fwd, value.value.max_bwd) if name == "fp8_format" else value


@pytest.mark.parametrize("setting", RECIPES)
def test_each_setting_is_in_its_field_of_the_recipe(setting):
    from transformer_engine.common.recipe import DelayedScaling

    from megatron.model.transformer_engine import fp8_recipe

    default, field, default_gives, other, other_gives = RECIPES[setting]
    standard, changed = fp8_recipe(_args()), fp8_recipe(_args(**{setting: other}))
    assert isinstance(standard, DelayedScaling)
    assert getattr(_args(), setting) == default
    assert _field(standard, field) == default_gives and _field(changed, field) == other_gives
    for _, name, wanted, *_ in RECIPES.values():
        assert name == field or _field(changed, name) == wanted
    assert changed.fp8_mha and changed.fp8_dpa


def test_a_version_that_always_has_weight_gradients_in_fp8(monkeypatch):
    """As 2.20, whose recipe has no override_linear_precision."""
    from megatron.model.transformer_engine import api, fp8_recipe

    def recipe(margin, fp8_format, amax_history_len, amax_compute_algo, fp8_dpa, fp8_mha):
        return margin

    monkeypatch.setattr(api, "DelayedScaling", recipe)
    assert fp8_recipe(_args(te_fp8_margin=5)) == 5
    with pytest.raises(BackendError, match="te_fp8_wgrad=False"):
        fp8_recipe(_args(te_fp8_wgrad=False))


def test_the_context_is_fp8_only_when_asked_for(with_fp8):
    from megatron.model.transformer_engine import fp8_context, fp8_recipe

    with fp8_context(tiny_args(te_columnparallel=True)):
        assert not with_fp8.is_fp8_enabled()
    args = _args(te_fp8_margin=2)
    with fp8_context(args):
        assert with_fp8.is_fp8_enabled()
        assert with_fp8.get_fp8_recipe() == fp8_recipe(args)
        assert with_fp8.get_fp8_group() is None  # one rank
    assert not with_fp8.is_fp8_enabled()


def test_a_device_without_fp8_is_refused_by_name(state):
    from megatron.model.transformer_engine import fp8_context

    with pytest.raises(BackendError, match="te_fp8_mha=True.*8.9 or higher.*bfloat16"):
        with fp8_context(_args()):
            raise AssertionError("the context was entered")


ATTENTION = {"attention.qkv", "attention.core_attention", "attention.proj"}
RUNS = {
    "attention": (dict(), set(), set()),
    "linear layers": (
        dict(te_columnparallel=True, te_rowparallel=True),
        {"mlp.linear1", "mlp.linear2"},
        {"final_linear"},
    ),
    "mlp": (dict(te_layernorm_mlp=True, activation="swiglu"), {"mlp"}, set()),
}
"""Settings, TE modules in a layer beside attention, and TE modules outside of the layers, which have no FP8."""


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", RUNS)
def test_the_products_of_the_layers_are_in_fp8_and_no_others(name, checkpointed, with_fp8, monkeypatch):
    """Each TE module notes TE's state at its forward pass, then computes without FP8. Recomputation is the same."""
    import transformer_engine.pytorch as te

    settings, inside, outside = RUNS[name]
    args = _args(**settings, checkpoint_activations=checkpointed, checkpoint_num_layers=1, ffn_hidden_size=48)
    model = build_model(args)
    names = {id(module): path.split(".", 2)[-1] for path, module in model.named_modules()}
    seen = []
    for kind in (te.Linear, te.LayerNormMLP, te.DotProductAttention):
        monkeypatch.setattr(kind, "forward", _noting(kind.forward, names, seen, with_fp8))
    (inputs, _) = batch()
    model.train()
    model(inputs).float().sum().backward()
    times = args.num_layers * (2 if checkpointed else 1)
    inside = inside | ATTENTION
    assert {key: seen.count((key, True)) for key in inside} == dict.fromkeys(inside, times)
    assert {key for key, fp8 in seen if not fp8} == outside
    assert not with_fp8.is_fp8_enabled()


def _noting(forward, names, seen, state):
    import transformer_engine.pytorch as te

    def noting(self, *args, **kwargs):
        seen.append((names[id(self)], state.is_fp8_enabled()))
        with te.fp8_autocast(enabled=False):
            return forward(self, *args, **kwargs)

    return noting


def test_te_itself_takes_its_fp8_kernels_in_the_context(with_fp8, monkeypatch):
    """They have no stand-in: their call is the proof."""
    from megatron.model.transformer_engine import TERowParallelLinear, fp8_context

    args = _args()
    layer = TERowParallelLinear(args, 32, 16, init_method=torch.nn.init.normal_)
    x = torch.zeros(16, 1, 32, dtype=torch.bfloat16)
    layer(x)
    monkeypatch.setattr(with_fp8, "reduce_and_update_fp8_tensors", lambda **_: None)  # at the end of the context
    with pytest.raises(NotImplementedError, match="no stand-in for transformer_engine_torch.*cast"):
        with fp8_context(args):
            layer(x)


REFUSED = {
    "te_fp8_wgrad=False describes FP8, which is off": dict(te_fp8_mha=False, te_fp8_wgrad=False),
    "te_fp8_format=e4m3 describes FP8": dict(te_fp8_mha=False, te_fp8_format="e4m3"),
    "te_fp8_margin=2 describes FP8": dict(te_fp8_mha=False, te_fp8_margin=2),
    "te_fp8_amax_history_len=3 describes FP8": dict(te_fp8_mha=False, te_fp8_amax_history_len=3),
    "te_fp8_amax_compute_algo=max describes FP8": dict(te_fp8_mha=False, te_fp8_amax_compute_algo="max"),
    "te_fp8_amax_compute_algo=mean: use max or most_recent": dict(te_fp8_amax_compute_algo="mean"),
    "te_fp8_amax_history_len=0": dict(te_fp8_amax_history_len=0),
    "precision=fp32: te_fp8_mha=True": dict(precision="fp32"),
    "hidden_size is 72": dict(hidden_size=72),
    "the query width of a rank is 24": dict(model_parallel_size=4, num_kv_heads=4, global_num_gpus=4, head_dim=24),
    "the QKV width of a rank is 72": dict(num_kv_heads=1, head_dim=12),
    "the MLP width of a rank is 40": dict(te_columnparallel=True, ffn_hidden_size=40),
    "seq_length x train_micro_batch_size_per_gpu is 30": dict(seq_length=15, max_position_embeddings=15),
    "pos_emb=alibi: te_fp8_mha=True": dict(pos_emb="alibi"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_fp8_cannot_do_is_refused_with_the_config(message):
    with pytest.raises(ConfigError) as caught:
        _args(**REFUSED[message])
    assert any(problem.startswith(message) for problem in caught.value.problems), caught.value.problems


def test_text_is_generated_without_fp8_from_the_same_weights():
    """It comes one token at a time, and FP8 needs multiples of 16."""
    values = tiny_values(**FP8, te_fp8_format="e4m3", te_fp8_margin=1, load="x")
    flags = ["--megatron_config", command_line.encode(values)]
    training, generating = NeoXArgs.consume_neox_args(input_args=flags), NeoXArgs.consume_inference_args({}, flags)
    assert training.te_fp8_mha and not generating.te_fp8_mha and generating.te_mha
    plain = ["--megatron_config", command_line.encode(tiny_values(load="x"))]
    assert not NeoXArgs.consume_inference_args({}, plain).te_mha


def test_a_width_that_is_not_multiplied_in_fp8_is_free():
    assert _args(ffn_hidden_size=40).te_fp8_mha
