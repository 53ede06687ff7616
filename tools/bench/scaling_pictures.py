"""The pictures of the scaling study; each is drawn on a matplotlib figure from the rows of its table."""

from typing import Any, Callable, Dict, List, Sequence

from tools.bench.report import Row

MEASURED, PREDICTED, OTHER = "#20639b", "#c44e52", "#8c8c8c"
KINDS = {
    "same width": "equal n·d: 8 x 64, 4 x 128, 2 x 256",
    "same heads": "8 heads, narrower MLP",
}
_COLORS = ("#20639b", "#e08a1e", "#4a9c5d")


def against_operations(name: str) -> Callable[[Any, Sequence[Row]], None]:
    """Time relative to the first point, beside operations with and without the causal half."""

    def draw(figure: Any, rows: Sequence[Row]) -> None:
        figure.set_size_inches(7, 4)
        axes = figure.add_subplot()
        places = range(len(rows))
        lines = (
            ("time / first", "measured time", MEASURED, "o-"),
            ("causal FLOPs / first", "FLOPs, causal half only", PREDICTED, "s--"),
            ("FLOPs / first", "FLOPs, as logged (full square)", OTHER, "^:"),
        )
        for column, label, color, style in lines:
            axes.plot(places, [row[column] for row in rows], style, color=color, label=label)
        axes.set_xticks(places, [row[name] for row in rows])
        axes.set_xlabel({"length": "tokens of a text", "layers": "layers"}[name])
        axes.set_ylabel("relative to the first point")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()

    return draw


def head_dim(figure: Any, rows: Sequence[Row]) -> None:
    """Tokens/s over head_dim, relative to head_dim 64, for each kernel; the operations' own ratio as a line."""
    figure.set_size_inches(10, 4)
    for number, (kind, axes) in enumerate(_panels(figure)):
        own = [row for row in rows if row["kind"] == kind]
        for color, (kernel, part) in zip(_COLORS, _by(own, "kernel").items(), strict=False):
            speeds = [1 / row["time / first"] for row in part]
            axes.plot(range(len(part)), speeds, "o-", color=color, label=kernel)
        part = next(iter(_by(own, "kernel").values()))
        ideal = [1 / row["causal FLOPs / first"] for row in part]
        axes.plot(range(len(part)), ideal, "s--", color=PREDICTED, label="by FLOPs (causal)")
        axes.set_xticks(range(len(part)), [row["head_dim"] for row in part])
        axes.set_title(KINDS[kind])
        axes.set_xlabel("head_dim")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if number == 0:
            axes.set_ylabel("tokens/s, relative to head_dim 64")
            axes.legend(loc="lower left")


def memory(figure: Any, rows: Sequence[Row]) -> None:
    """Memory of a step for each kernel and head_dim, with the estimate as a mark."""
    figure.set_size_inches(10, 4)
    for number, (kind, axes) in enumerate(_panels(figure)):
        parts = _by([row for row in rows if row["kind"] == kind], "kernel")
        _grouped(axes, parts, "head_dim", "step, MB", "estimate, MB")
        axes.set_title(KINDS[kind])
        axes.set_xlabel("head_dim")
        if number == 0:
            axes.set_ylabel("MB of a step beyond weights and optimizer")
            axes.legend(loc="upper left")


def decode(figure: Any, rows: Sequence[Row]) -> None:
    """Time per token and size of the cache over head_dim, for both forms of the cache."""
    figure.set_size_inches(10, 6.4)
    grid = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, kind in enumerate(KINDS):
        parts = _by([row for row in rows if row["kind"] == kind], "cache")
        for line, value in enumerate(("ms per token", "cache, MB")):
            axes = grid[line][column]
            _grouped(axes, parts, "head_dim", value)
            if column == 0:
                axes.set_ylabel(value)
        grid[0][column].set_title(KINDS[kind])
        grid[1][column].set_xlabel("head_dim")
    grid[0][0].legend(loc="upper left")


def zero(figure: Any, rows: Sequence[Row]) -> None:
    """Memory of the fullest rank under every stage, with the estimate as a mark."""
    figure.set_size_inches(7, 4)
    axes = figure.add_subplot()
    _grouped(axes, _by(rows, "precision"), "stage", "fullest rank, MB", "estimate, MB")
    axes.set_ylabel("MB on the fullest of two ranks")
    axes.legend()


def _panels(figure: Any):
    return zip(KINDS, figure.subplots(1, len(KINDS), sharey=True), strict=True)


def _by(rows: Sequence[Row], column: str) -> Dict[str, List[Row]]:
    """The rows of each value of a column, in order."""
    parts: Dict[str, List[Row]] = {}
    for row in rows:
        parts.setdefault(row[column], []).append(row)
    return parts


def _grouped(axes: Any, parts: Dict[str, List[Row]], place: str, value: str, mark: str = "") -> None:
    """Bars of each part beside each other at every place, with their values, and a black line at `mark`."""
    width = 0.8 / len(parts)
    for number, (name, rows) in enumerate(parts.items()):
        middles = [index + (number - (len(parts) - 1) / 2) * width for index in range(len(rows))]
        bars = axes.bar(middles, [row[value] for row in rows], width * 0.92, color=_COLORS[number], label=name)
        axes.bar_label(bars, [f"{row[value]:.3g}" for row in rows], label_type="center", color="white", fontsize=9)
        if mark:
            label = "estimate" if number == 0 else None
            axes.hlines(
                [row[mark] for row in rows],
                [middle - width / 2 for middle in middles],
                [middle + width / 2 for middle in middles],
                color="black", linewidth=2, label=label,
            )  # fmt: skip
        axes.set_xticks(range(len(rows)), [row[place] for row in rows])
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
