"""loss_curve.png, drawn from the run's own records."""

import os
from typing import Any, Dict, List

import numpy as np

FILE_NAME = "loss_curve.png"
SMOOTH_FROM = 60
"""Curves with more points than this get a running mean on top of the raw line."""


def draw_loss_curve(records: List[Dict[str, Any]], folder: str, title: str = "") -> str | None:
    """Write `folder`/loss_curve.png (atomically) and return its path; None when there is nothing to draw."""
    train = _points(records, "loss")
    if not len(train):
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_train(axes, train)
    for key, label, color in (("valid_loss", "validation", "tab:orange"), ("test_loss", "test", "tab:green")):
        points = _points(records, key)
        if len(points):
            axes.plot(points[:, 0], points[:, 1], color=color, marker="o", markersize=4, label=label, zorder=3)
    axes.set_xlabel("iteration (optimizer steps)")
    axes.set_ylabel("cross-entropy loss (nats per token)")
    axes.set_title(title or "loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    path = os.path.join(folder, FILE_NAME)
    temporary = f"{path}.tmp"
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
    return path


def _draw_train(axes, train: np.ndarray) -> None:
    if len(train) <= SMOOTH_FROM:
        marker = "." if len(train) < 3 else None
        axes.plot(train[:, 0], train[:, 1], color="tab:blue", marker=marker, label="training")
        return
    window = max(5, len(train) // 40 | 1)  # odd, so that it has a middle
    smooth = np.convolve(train[:, 1], np.ones(window) / window, mode="valid")
    axes.plot(train[:, 0], train[:, 1], color="tab:blue", alpha=0.3, linewidth=0.8, label="training")
    middles = train[window // 2 : len(train) - window // 2, 0]
    axes.plot(middles, smooth, color="tab:blue", label=f"training, mean of {window} logged steps")


def _points(records: List[Dict[str, Any]], key: str) -> np.ndarray:
    pairs = [(record["iteration"], record[key]) for record in records if record.get(key) is not None]
    return np.array(pairs, dtype=float).reshape(-1, 2)
