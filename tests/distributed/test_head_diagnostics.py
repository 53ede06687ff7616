"""log_head_diagnostics: the figures of a training step do not depend on how the model is split, and are those of
autograd's own gradients and of the weights in the checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.test_training_layouts import values_for, write_data
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import MQA, WIDE_NON_DIVISIBLE

LOOK = 2
MODELS = {
    "gqa": dict(WIDE_NON_DIVISIBLE, norm="rmsnorm", activation="swiglu", ffn_hidden_size=52, use_qk_layernorm=True),
    "by_layer": dict(WIDE_NON_DIVISIBLE, head_dim=[16, 40], num_kv_heads=[[6, 1], [2, 1]]),
    "groups": dict(
        WIDE_NON_DIVISIBLE,
        num_attention_heads=8,
        num_kv_heads=4,
        qk_norm_type="per_head",
        head_dim=[[24, 2], dict(layer=1, groups=[[10, 6, 2], [32, 2, 2]])],
    ),
    "mqa_alibi": dict(MQA, num_attention_heads=4, pos_emb="alibi"),
}
LAYOUTS = {
    "tp2": dict(model_parallel_size=2),
    "pp2": dict(pipe_parallel_size=2),
    "dp2 zero1": dict(zero_optimization={"stage": 1}),
    "dp2 zero3": dict(zero_optimization={"stage": 3}),
}
RUNS = [
    *(("gqa", layout) for layout in LAYOUTS),
    *((model, layout) for model in ("by_layer", "groups") for layout in ("tp2", "pp2")),
    ("mqa_alibi", "tp2"),
]
"""At two ranks the one key/value head of the second is shared."""


@pytest.fixture(scope="module")
def data_path(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def train(rank, world_size, runs):
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import pretrain

    for values in runs:
        pretrain(NeoXArgs.from_dict(values))


def values_of(model, data_path, folder, world_size, **layout):
    settings = dict(train_iters=LOOK, log_head_diagnostics=LOOK, eval_iters=0, do_valid=None, do_test=None)
    settings = {key: value for key, value in settings.items() if value is not None}
    return values_for(data_path, folder, world_size, **{**MODELS[model], **settings, **layout})


def report_in(folder):
    (line,) = Path(folder, "head_diagnostics.jsonl").read_text().splitlines()
    assert Path(folder, "head_diagnostics.png").stat().st_size > 10_000
    return json.loads(line)


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def reports(data_path, events, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    shown = {"gqa": dict(tensorboard_dir=str(events))}
    one = [values_of(model, data_path, str(root / model), 1, **shown.get(model, {})) for model in MODELS]
    run_distributed(1, train, one, tmp_path=root)
    two = [values_of(model, data_path, str(root / f"{model} {layout}"), 2, **LAYOUTS[layout]) for model, layout in RUNS]
    run_distributed(2, train, two, tmp_path=root)
    return {folder.name: report_in(folder) for folder in root.iterdir() if folder.is_dir()}


@pytest.mark.parametrize("model, layout", RUNS)
def test_layouts(reports, model, layout):
    one, two = reports[model], reports[f"{model} {layout}"]
    assert [layer["layer"] for layer in two["layers"]] == [0, 1] and two["iteration"] == LOOK
    for ours, theirs in zip(two["layers"], one["layers"], strict=True):
        assert list(ours["figures"]) == list(theirs["figures"])
        for name, values in theirs["figures"].items():
            np.testing.assert_allclose(ours["figures"][name], values, rtol=2e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_every_head_has_every_figure(reports, model):
    heads = MODELS[model]["num_attention_heads"]
    wanted = {
        "gradient_norm",
        "score_std",
        "score_max",
        "entropy",
        "attention_rank",
        "output_norm",
        "qk_rank",
        "ov_norm",
    }
    for layer in reports[model]["layers"]:
        assert wanted <= set(layer["figures"])
        assert all(len(values) == heads and np.isfinite(values).all() for values in layer["figures"].values())
        assert ("rotary_share" in layer["figures"]) == (model != "mqa_alibi")


def test_widths_are_each_layers_own(reports):
    """By layer: head_dim, and ranks of a head's circuits up to it."""
    layers = reports["by_layer"]["layers"]
    assert [layer["head_dim"] for layer in layers] == [16, 40]
    for layer in layers:
        most = layer["head_dim"]
        ranks = layer["figures"]["qk_rank"] + layer["figures"]["ov_rank"]
        assert 0.5 * most < max(ranks) <= most + 1e-3


def test_heads_are_numbered_over_the_groups(tmp_path):
    """Gradient norms of the rows and columns of each head, which follow each other group by group; spectra as long as
    each head is wide."""
    from megatron.head_diagnostics import HeadDiagnostics
    from megatron.head_diagnostics.picture import draw_report
    from megatron.model.gpt2_model import GPT2ModelSequential, masked_cross_entropy
    from tests.helpers.attention_reference import split_reference
    from tests.helpers.configs import tiny_args

    model = GPT2ModelSequential(tiny_args(**MODELS["groups"], seed=4))
    attention = model.sequential[3].attention
    kernels = [group.kernel for group in attention.groups]
    diagnostics = HeadDiagnostics(model, tokens=9, spectra=True)
    diagnostics.begin()
    tokens = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(1))
    logits = model((tokens[:, :-1], torch.arange(16).expand(2, 16)))
    masked_cross_entropy(logits, (tokens[:, 1:], torch.ones(2, 16))).backward()
    diagnostics.measure()
    report = diagnostics.report()
    plain, mixed = report.layers
    assert plain.head_dim == 24 and mixed.head_dim == [10] * 6 + [32] * 2
    assert all(len(values) == 8 for values in mixed.figures.values())
    assert [len(values) for values in mixed.spectra["qk"]] == [len(values) for values in mixed.spectra["ov"]]
    assert [len(values) for values in mixed.spectra["qk"]] == mixed.head_dim
    rows = attention.query_key_value.weight.grad.split([(6 + 4) * 10, (2 + 4) * 32])
    columns = attention.dense.weight.grad.double().split([60, 64], dim=1)
    found = iter(mixed.figures["gradient_norm"])
    for part, dense, (n, m, d) in zip(rows, columns, ((6, 2, 10), (2, 2, 32)), strict=True):
        q, k, v = (x[:, 0].double() for x in split_reference(part.mT.reshape(80, 1, -1), n, m, d))
        for head in range(n):
            squares = q[:, head].square().sum() + dense[:, head * d : (head + 1) * d].square().sum()
            shared = k[:, head * m // n].square().sum() + v[:, head * m // n].square().sum()
            assert next(found) == pytest.approx(float((squares + shared * m / n).sqrt()), rel=1e-4)
    draw_report(report, str(tmp_path / "heads.png"), "groups")
    diagnostics.close()
    assert [group.kernel for group in attention.groups] == kernels


def test_spectra_are_as_long_as_a_head_is_wide(tmp_path):
    from megatron.head_diagnostics import HeadDiagnostics
    from megatron.head_diagnostics.picture import draw_report
    from megatron.model.gpt2_model import GPT2ModelSequential
    from tests.helpers.configs import tiny_args

    model = GPT2ModelSequential(tiny_args(**MODELS["by_layer"]))
    diagnostics = HeadDiagnostics(model, tokens=9, spectra=True)
    diagnostics.begin()
    model((torch.zeros(1, 9, dtype=torch.int64), torch.arange(9)[None]))
    diagnostics.measure(gradients=False)
    report = diagnostics.report()
    for layer, width in zip(report.layers, (16, 40), strict=True):
        for name, length in (("qk", width), ("ov", width), ("attention", 9)):
            assert [len(values) for values in layer.spectra[name]] == [length] * 6, name
    draw_report(report, str(tmp_path / "heads.png"), "by layer")
    assert (tmp_path / "heads.png").stat().st_size > 10_000


def test_tensorboard_gets_curves_and_the_picture(reports, events):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(events)).Reload()
    assert [event.step for event in found.Images("heads")] == [LOOK]
    (curve,) = found.Scalars("heads/output_norm_max/layer_1")
    assert curve.value == pytest.approx(max(reports["gqa"]["layers"][1]["figures"]["output_norm"]))


def test_figures_are_those_of_the_model(tmp_path):
    """One process, without an engine: autograd's gradients and the definition of attention, by hand."""
    from megatron.head_diagnostics import HeadDiagnostics
    from megatron.model.gpt2_model import GPT2ModelSequential, masked_cross_entropy
    from tests.helpers.attention_reference import split_reference
    from tests.helpers.configs import tiny_args

    args = tiny_args(**MODELS["gqa"], seed=4)
    model = GPT2ModelSequential(args)
    attention = model.sequential[3].attention
    kernel = attention.kernel
    diagnostics = HeadDiagnostics(model, tokens=9)
    diagnostics.begin()
    tokens = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, 16)
    loss = masked_cross_entropy(model((tokens[:, :-1], positions)), (tokens[:, 1:], torch.ones(2, 16)))
    loss.backward()
    diagnostics.measure()
    report = diagnostics.report()
    assert report.tokens == 9
    n, m, d = 6, 2, 24
    gradient = attention.query_key_value.weight.grad.mT.reshape(80, 1, -1)
    q, k, v = (x[:, 0].double() for x in split_reference(gradient, n, m, d))
    dense = attention.dense.weight.grad.double().reshape(80, n, d)
    for head in range(n):
        squares = q[:, head].square().sum() + dense[:, head].square().sum()
        squares = squares + (k[:, head // 3].square().sum() + v[:, head // 3].square().sum()) / 3
        assert report.layers[1].figures["gradient_norm"][head] == pytest.approx(float(squares.sqrt()), rel=1e-4)
    diagnostics.close()
    assert attention.kernel is kernel
