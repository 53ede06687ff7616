"""`compile`: when layers are compiled, that compiled ones compute and train as the uncompiled, and what is refused.

One model is compiled by inductor; the others by its front end only, which traces and differentiates the same pieces
but runs them with torch's operators, in a fraction of the time.
"""

from functools import partial

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from megatron import mpu
from megatron.errors import BackendError, ConfigError
from megatron.initialize import initialize_megatron
from megatron.model import compiling
from megatron.model.gpt2_model import build_model
from tests.helpers.configs import tiny_args
from tests.helpers.engines import build_engine, train
from tests.helpers.geometries import GQA_TP4, MHA_TP4, MQA, NARROW
from tests.helpers.model_runs import batch, forward_backward
from tests.helpers.tolerances import FORWARD, GRADIENT, LOSS, TRAJECTORY

QWEN = dict(
    NARROW, norm="rmsnorm", qk_norm_type="per_head", activation="swiglu", ffn_hidden_size=44, use_bias_in_mlp=False
)
CASES = {
    "dropout, grouped queries": dict(QWEN, hidden_dropout=0.2, attention_dropout=0.1),
    "sandwich, zero-centred": dict(QWEN, norm_placement="sandwich", zero_centered_gamma=True, activation="geglu_tanh"),
    "norms over all heads, post": dict(QWEN, norm_placement="post", qk_norm_type="full_width"),
    "joint norm, one kv head": dict(MQA, norm="rmsnorm", use_qk_layernorm=True, rotary_pct=0.7),
    "pythia": dict(MHA_TP4, norm="layernorm", gpt_j_residual=True, rotary_pct=0.3, activation="gelu"),
    "tied, biases": dict(GQA_TP4, norm="rmsnorm", gpt_j_residual=True, gpt_j_tied=True, activation="reglu"),
    "gemma 4": dict(QWEN, norm_placement="sandwich", v_norm=True, shared_key_value=True, layer_scalar=True),
    "checkpointed": dict(QWEN, checkpoint_activations=True, hidden_dropout=0.2),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """dynamo counts what it has compiled of a function, and gives up after eight."""
    torch._dynamo.reset()
    compiling.compiled.cache_clear()
    yield
    torch._dynamo.reset()
    compiling.compiled.cache_clear()


@pytest.fixture
def front_end(monkeypatch):
    """Counts the graphs that are compiled, without inductor."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return graphs


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_uncompiled_layers(front_end, name):
    torch.manual_seed(0)
    loss, _, gradients = forward_backward(CASES[name])
    assert not front_end
    compiled_loss, _, compiled = forward_backward(dict(CASES[name], compile=True))
    assert len(front_end) > 0
    assert compiled_loss == pytest.approx(loss, abs=LOSS)
    assert compiled.keys() == gradients.keys()
    for key, expected in gradients.items():
        assert abs(compiled[key] - expected).max() <= GRADIENT[torch.float32], key


def test_one_compilation_serves_all_layers(front_end):
    numbers = []
    for layers in (1, 3):
        front_end.clear()
        torch._dynamo.reset()
        forward_backward(dict(QWEN, num_layers=layers, compile=True))
        numbers.append(len(front_end))
    # Norms of the hidden states, queries and keys; rotation of queries and keys; the activation.
    assert numbers == [6, 6]


def test_layers_of_any_number_of_widths_are_compiled(front_end):
    widths = dict(hidden_size=40, num_attention_heads=2, num_kv_heads=1, num_layers=6, head_dim=[8, 10, 12, 14, 16, 18])
    forward_backward(dict(widths, compile=True))
    rotations = [graph for graph in front_end if len(list(graph.graph.find_nodes(op="placeholder"))) == 3]
    assert len(rotations) == 2 * 6, "queries and keys of each width"


def test_inductor_trains_as_uncompiled(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # DeepSpeed's engine insists on it
    compiling._announce.cache_clear()
    losses = {}
    for compile in (False, True):
        args = tiny_args(**QWEN, num_layers=1, compile=compile, hidden_dropout=0.1)
        engine = build_engine(args)
        losses[compile] = train(args, engine, 4)
        said = capsys.readouterr().out
        assert ("compiling the layers" in said) == compile
    assert losses[True] == pytest.approx(losses[False], abs=TRAJECTORY)
    assert losses[True] != losses[False], "inductor rounds elsewhere: equal bits mean that nothing was compiled"


def test_inductor_in_bf16_is_as_near_to_fp32_as_uncompiled():
    """One step more than rounding: bf16 weights of both, against the same weights in fp32."""
    outputs = {}
    for compile, precision in ((False, "fp32"), (False, "bfloat16"), (True, "bfloat16")):
        args = tiny_args(**QWEN, compile=compile, precision=precision)
        initialize_megatron(args)
        model = build_model(args)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)
        outputs[compile, precision] = model(batch()[0]).float()
    exact = outputs[False, "fp32"]
    plain, compiled = ((outputs[c, "bfloat16"] - exact).abs().max() for c in (False, True))
    assert compiled <= FORWARD[torch.bfloat16] and compiled <= 1.5 * plain
    assert not torch.equal(outputs[True, "bfloat16"], outputs[False, "bfloat16"])


def test_without_gradients_nothing_is_compiled(front_end):
    args = tiny_args(**QWEN, compile=True)
    initialize_megatron(args)
    model = build_model(args)
    with torch.no_grad():
        model(batch()[0])
    assert not front_end
    model(batch()[0])
    assert front_end


# When


def _wants(**settings):
    return compiling.wants_compile(tiny_args(**settings))


def test_auto_compiles_long_runs_on_a_cpu_with_a_compiler(monkeypatch):
    long = dict(compile="auto", train_iters=compiling.AUTO_FROM_ITERS)
    assert _wants(**long)
    assert not _wants(**{**long, "train_iters": compiling.AUTO_FROM_ITERS - 1})
    assert not _wants(**{**long, "train_iters": None}) and not _wants(train_iters=10**6)
    assert not _wants(**long, te_rowparallel=True)
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "has_compiler", lambda: False)
        assert not _wants(**long)
    monkeypatch.setattr(mpu, "current_device", lambda: torch.device("cuda"))
    assert not _wants(**long) and _wants(compile=True)


def test_true_without_a_compiler_is_refused(monkeypatch):
    def search():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", search)
    compiling.has_compiler.cache_clear()
    try:
        args = tiny_args(**QWEN, compile=True)
        initialize_megatron(args)
        with pytest.raises(BackendError, match="compile=True needs a C\\+\\+ compiler.*compile: false"):
            build_model(args)
    finally:
        compiling.has_compiler.cache_clear()


@pytest.mark.parametrize("name", ("te_mha", "te_layernorm_mlp", "te_columnparallel", "te_rowparallel"))
def test_true_does_not_go_with_transformer_engine(name):
    with pytest.raises(ConfigError, match=f"compile=True does not go with {name}=True"):
        tiny_args(**{name: True}, compile=True)


def test_other_values_are_refused():
    for value in ("yes", 1, "layers"):
        with pytest.raises(ConfigError, match=f"compile={value!r} must be one of True, False, auto"):
            tiny_args(compile=value)
