"""The checklist: a rule fires on a report made to break it and not just within its limit. The picture; TensorBoard."""

import copy
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest

from megatron.head_diagnostics import findings
from megatron.head_diagnostics.picture import SPECTRA, TITLES, draw_report, report_figure
from megatron.head_diagnostics.report import HeadReport, LayerReport, plain

HEADS, WIDTH, TOKENS = 6, 24, 32
SANE = {
    "gradient_norm": 0.1, "score_std": 1.0, "score_max": 9.0, "score_rank": 11.0, "entropy": 2.0, "entropy_share": 0.6,
    "attention_rank": 14.0, "first_token": 0.1, "output_norm": 3.0, "rotary_share": 0.5, "qk_rank": 15.0,
    "ov_rank": 12.0, "qk_norm": 1.5, "ov_norm": 1.1,
}  # fmt: skip


def sane(layers=2):
    """Heads that differ a little."""
    spread = [1 + 0.05 * head for head in range(HEADS)]
    made = [
        LayerReport(
            layer,
            WIDTH,
            {name: [value * factor for factor in spread] for name, value in SANE.items()},
            alike=[(0, 1, 0.7)],
            spectra={"attention": [[1.0, 0.1]] * HEADS, "qk": [[2.0, 0.2]] * HEADS, "ov": [[3.0, 0.3]] * HEADS},
        )
        for layer in range(layers)
    ]
    return HeadReport(7, TOKENS, made)


def with_figure(name, head, value):
    report = copy.deepcopy(sane())
    report.layers[1].figures[name][head] = value
    return report


def with_alike(cosine):
    report = copy.deepcopy(sane())
    report.layers[1].alike.append((2, 5, cosine))
    return report


# rule: (a report just beyond its limit, one just within it, where)
CASES = {
    "figures are not finite": (with_figure("ov_norm", 3, math.nan), with_figure("ov_norm", 3, 1e6), [(1, 3)]),
    "gradient norms of a layer's heads differ by 3 or more": (
        with_figure("gradient_norm", 5, 0.301), with_figure("gradient_norm", 5, 0.299), [(1, -1)],
    ),
    "attention logits are large": (
        with_figure("score_max", 2, 50.1), with_figure("score_max", 2, 49.9), [(1, 2)],
    ),
    "attention has collapsed to single tokens": (
        with_figure("entropy_share", 4, 0.049), with_figure("entropy_share", 4, 0.051), [(1, 4)],
    ),
    "attention is uniform: the head only averages": (
        with_figure("entropy_share", 4, 0.981), with_figure("entropy_share", 4, 0.979), [(1, 4)],
    ),
    # the median of 3.0 .. 3.75, one of them replaced, is 3.375
    "heads add next to nothing to the residual stream": (
        with_figure("output_norm", 0, 0.168), with_figure("output_norm", 0, 0.174), [(1, 0)],
    ),
    "heads attend alike": (with_alike(0.951), with_alike(0.949), [(1, 2), (1, 5)]),
    "heads use little of their width to choose tokens": (
        with_figure("qk_rank", 1, 5.9), with_figure("qk_rank", 1, 6.1), [(1, 1)],
    ),
    "heads rest on the first token": (
        with_figure("first_token", 3, 0.51), with_figure("first_token", 3, 0.49), [(1, 3)],
    ),
}  # fmt: skip


def test_a_sane_report_has_no_findings():
    assert findings(sane()) == []


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_beyond_its_limit_and_not_before(rule):
    beyond, within, where = CASES[rule]
    (finding,) = findings(beyond)
    assert (finding.rule, finding.where) == (rule, where)
    assert finding.measured and finding.source and finding.advice
    place = f"layer {where[0][0]}" + ("" if where[0][1] < 0 else f" head {where[0][1]}")
    assert rule in str(finding) and place in str(finding)
    assert findings(within) == []


def test_every_rule_is_tested():
    from megatron.head_diagnostics.checklist import RULES

    assert len(CASES) == len(RULES)


def test_a_report_without_gradients():
    report = sane()
    for layer in report.layers:
        del layer.figures["gradient_norm"]
    assert findings(report) == []


def test_many_places_are_counted():
    report = sane(layers=4)
    for layer in report.layers:
        layer.figures["first_token"] = [0.9] * HEADS
    (finding,) = findings(report)
    assert "layer 0 head 5 and 18 more" in str(finding) and "up to 90%" in str(finding)


def test_figures_that_are_not_finite_are_null_in_json():
    assert plain({"a": [math.nan, (1.0, math.inf)], "b": "nan"}) == {"a": [None, [1.0, None]], "b": "nan"}


def test_picture_has_a_panel_for_each_figure_and_spectrum(tmp_path):
    report = sane(layers=3)
    del report.layers[0].figures["rotary_share"]  # a layer without rotation
    report.layers[1].figures = {name: values[:4] for name, values in report.layers[1].figures.items()}
    report.layers[1].spectra["qk"] = [[2.0, 0.4, 0.1]] * 4  # wider heads
    report.layers[2].figures["score_max"][0] = math.nan
    figure = report_figure(report, "a title")
    axes = {axis.get_title(): axis for axis in figure.axes if axis.get_title()}
    assert list(axes) == [*TITLES.values(), *(f"singular values of {name}" for name in SPECTRA.values())]
    assert figure.get_suptitle() == "a title"
    (image,) = axes["output norm"].images
    shown = np.ma.filled(image.get_array(), np.nan)
    assert shown.shape == (3, HEADS) and np.isnan(shown[1, 4:]).all()
    np.testing.assert_allclose(shown[0], report.layers[0].figures["output_norm"])
    assert axes["length in rotated dimensions"].images[0].get_array().shape == (2, HEADS)
    lines = axes["singular values of W_q'W_k"].lines
    assert [list(line.get_ydata()) for line in lines] == [[1, 0.1], [1, 0.2, 0.05], [1, 0.1]]
    plt.close(figure)
    draw_report(report, str(tmp_path / "p.png"), "a title")
    assert plt.imread(tmp_path / "p.png").shape[1] == 1680 and plt.get_fignums() == []


def test_the_picture_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from megatron.logging.tensorboard import TensorBoardSink

    draw_report(sane(), str(tmp_path / "p.png"), "a title")
    sink = TensorBoardSink(str(tmp_path / "events"))
    sink.picture("heads", str(tmp_path / "p.png"), 7)
    sink.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    (event,) = events.Images("heads")
    height, width = plt.imread(tmp_path / "p.png").shape[:2]
    assert (event.step, event.width, event.height) == (7, width, height)
