"""What a benchmark found: a table on the screen, JSON, and a picture."""

import argparse
import json
import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from rich.console import Console
from rich.table import Table

Row = Dict[str, Any]
"""Column -> a number or a text; the first column names the row."""
WIDTH = 160
"""Columns of a table that does not go to a terminal."""
DEFAULT_FOLDER = os.path.join("runs", "bench")


class Target(NamedTuple):
    """A ratio that is wanted. most: the measured one is to be at most `wanted`, else at least. measured: None when it
    was not measured."""

    name: str
    wanted: float
    measured: Optional[float]
    most: bool = True

    @property
    def met(self) -> Optional[bool]:
        """None when it was not measured."""
        if self.measured is None:
            return None
        return self.measured <= self.wanted if self.most else self.measured >= self.wanted


def parser(documentation: Optional[str], name: str) -> argparse.ArgumentParser:
    """A command line with --out, the folder for NAME.json and NAME.png."""
    result = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument(
        "--out", default=DEFAULT_FOLDER, help=f"folder for {name}.json and {name}.png; default: %(default)s"
    )
    return result


def report(
    folder: str,
    name: str,
    title: str,
    rows: Sequence[Row],
    *,
    targets: Sequence[Target] = (),
    picture: Optional[Callable[[Any, Sequence[Row]], None]] = None,
    **more: Any,
) -> None:
    """Print `rows` as a table, write them with the targets and `more` to NAME.json, draw NAME.png.

    picture: a function (matplotlib figure, rows) that draws; `bars` makes one.
    """
    os.makedirs(folder, exist_ok=True)
    show(title, rows)
    if targets:
        show("targets", target_rows(targets))
    content = dict(
        title=title, machine=machine(), rows=list(rows), targets=[_as_dict(each) for each in targets], **more
    )
    with open(os.path.join(folder, f"{name}.json"), "w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    if picture is not None:
        _draw(os.path.join(folder, f"{name}.png"), picture, rows)


def show(title: str, rows: Sequence[Row]) -> None:
    """A table of all columns that a row has, in the order in which they first come."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0)
    for row in rows:
        table.add_row(*(text(row.get(column)) for column in columns))
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)


def text(value: Any) -> str:
    """A cell: floats with three significant digits, nothing for None."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def target_rows(targets: Sequence[Target]) -> List[Row]:
    """The targets as a table."""
    words = {True: "met", False: "not met", None: "not measured"}
    return [
        {"target": each.name, "wanted": f"{'<=' if each.most else '>='} {each.wanted:g}", "measured": each.measured,
         "": words[each.met]}
        for each in targets
    ]  # fmt: skip


def machine() -> Dict[str, Any]:
    """The processor by its model name, its cores, and the versions that matter; never the host's name."""
    import torch

    model = "unknown processor"
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    return dict(processor=model, cores=len(os.sched_getaffinity(0)), torch=torch.__version__)


def bars(column: str, label: str, limit: Optional[float] = None) -> Callable[[Any, Sequence[Row]], None]:
    """A picture: one horizontal bar for each row that has `column`, named by the row's first column, and a line at
    `limit`."""

    def draw(figure: Any, rows: Sequence[Row]) -> None:
        rows = [row for row in rows if isinstance(row.get(column), (int, float))]
        figure.set_size_inches(7, 1.2 + 0.35 * len(rows))
        axes = figure.add_subplot()
        drawn = axes.barh([next(iter(row.values())) for row in rows], [row[column] for row in rows], color="#4878a8")
        axes.bar_label(drawn, [text(row[column]) for row in rows], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(label)
        if limit is not None:
            axes.axvline(limit, color="#c44e52", linestyle="--")

    return draw


def _draw(path: str, picture: Callable[[Any, Sequence[Row]], None], rows: Sequence[Row]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    picture(figure, rows)
    figure.savefig(path)


def _as_dict(target: Target) -> Dict[str, Any]:
    return {**target._asdict(), "met": target.met}
