"""The figures of a report as one picture: a heat map of layers and heads for each, and spectra."""

import math
from typing import List

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from megatron.head_diagnostics.report import HeadReport  # noqa: E402

TITLES = {
    "gradient_norm": "gradient norm",
    "score_std": "spread of the scores",
    "score_max": "largest score",
    "score_rank": "effective rank of the scores",
    "entropy_share": "entropy / largest possible",
    "attention_rank": "effective rank of attention",
    "first_token": "weight on the first token",
    "output_norm": "output norm",
    "rotary_share": "length in rotated dimensions",
    "qk_rank": "effective rank of W_q'W_k",
    "ov_rank": "effective rank of W_oW_v",
    "qk_norm": "largest singular value of W_q'W_k",
    "ov_norm": "largest singular value of W_oW_v",
}
SPECTRA = {"attention": "attention", "qk": "W_q'W_k", "ov": "W_oW_v"}
_COLUMNS = 4


def draw_report(report: HeadReport, path: str, title: str) -> None:
    """Write a PNG."""
    figure = report_figure(report, title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def report_figure(report: HeadReport, title: str) -> Figure:
    """The picture. Layers can have different numbers of heads: what a layer does not have stays white."""
    names = [name for name in TITLES if report.matrix(name)]
    spectra = [name for name in SPECTRA if any(name in layer.spectra for layer in report.layers)]
    rows = math.ceil((len(names) + len(spectra)) / _COLUMNS)
    height = min(0.28 * len(report.layers) + 1.3, 6.0)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(4.2 * _COLUMNS, height * rows), squeeze=False)
    places: List[Axes] = list(axes.flat)
    for name, axis in zip(names, places, strict=False):
        _heat_map(axis, report, name)
    for name, axis in zip(spectra, places[len(names) :], strict=False):
        _spectrum(axis, report, name)
    for axis in places[len(names) + len(spectra) :]:
        axis.set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    return figure


def _heat_map(axis: Axes, report: HeadReport, name: str) -> None:
    layers = [layer for layer in report.layers if name in layer.figures]
    heads = max(len(layer.figures[name]) for layer in layers)
    values = [layer.figures[name] + [math.nan] * (heads - len(layer.figures[name])) for layer in layers]
    image = axis.imshow(values, aspect="auto", cmap="viridis")
    axis.figure.colorbar(image, ax=axis)
    axis.set_title(TITLES[name], fontsize=10)
    axis.set_xlabel("head", fontsize=8)
    axis.set_ylabel("layer", fontsize=8)
    _whole_ticks(axis.xaxis, range(heads))
    _whole_ticks(axis.yaxis, [layer.layer for layer in layers])


def _whole_ticks(axis, labels) -> None:
    step = max(1, math.ceil(len(labels) / 12))
    axis.set_ticks(list(range(0, len(labels), step)), [str(label) for label in labels][::step])
    axis.set_tick_params(labelsize=7)


def _spectrum(axis: Axes, report: HeadReport, name: str) -> None:
    """The median head of each layer (of each width in it), as parts of its largest value."""
    layers = [layer for layer in report.layers if name in layer.spectra]
    colours = plt.get_cmap("plasma")
    for position, layer in enumerate(layers):
        colour = colours(position / max(1, len(layers) - 1) * 0.9)
        for middle in _middle_heads(layer.spectra[name]):
            largest = max(middle[0], 1e-30)
            axis.plot([max(value / largest, 1e-6) for value in middle], color=colour, linewidth=1)
    axis.set_yscale("log")
    axis.set_title(f"singular values of {SPECTRA[name]}", fontsize=10)
    axis.set_xlabel(f"index; first layer dark, last layer bright ({len(layers)} layers)", fontsize=8)
    axis.tick_params(labelsize=7)


def _middle_heads(spectra: List[List[float]]) -> List[List[float]]:
    """At each index the median over the heads, for heads whose spectra are equally long."""
    lengths = dict.fromkeys(map(len, spectra))
    alike = ([values for values in spectra if len(values) == length] for length in lengths)
    return [[sorted(values)[len(values) // 2] for values in zip(*heads, strict=True)] for heads in alike]
