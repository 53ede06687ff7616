"""The report of a study: one list of parts, shown as an HTML page that needs no other file, or as Markdown."""

import base64
import html
import json
import os
from typing import Any, Dict, List, NamedTuple, Union

import yaml
from rich.console import Console
from rich.table import Table as Shown

from tools.head_dim.sweep import tables
from tools.head_dim.sweep.pictures import draw
from tools.head_dim.sweep.summary import SUMMARY, summarise
from tools.head_dim.sweep.sweep import Sweep
from tools.head_dim.sweep.tables import Table

PAGE = "report.html"
STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ccc; padding: .25em .8em; text-align: right }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; height: auto } pre { background: #f4f4f4; padding: 1em; overflow-x: auto }
"""
CURVES = "Lines are means over the seeds, bands reach from the lowest to the highest of them."
RANKING = (
    "By the validation loss at the last step. Intervals are 95 % intervals of the mean, from Student's t over the "
    "seeds. Differences are paired by seed: runs of one seed read the same texts in the same order. A loss is called "
    "lower or higher where the interval of its difference leaves out 0, and not decided otherwise. Each comparison is "
    "made by itself, so that of twenty without a true difference one is expected to be called lower or higher."
)
COSTS = (
    "Tokens per second are the median logged interval of each run's own log, without the first one; memory is the peak "
    "resident size of the largest process, Python and its libraries included, which the cost model leaves out."
)
HEADS = "Means over layers, heads and seeds at the last look of log_head_diagnostics (docs/heads.md says what each is)."


class Heading(NamedTuple):
    """Of a section."""

    text: str


class Picture(NamedTuple):
    """path: of a PNG."""

    path: str
    text: str


class Code(NamedTuple):
    """Text to be shown as it is."""

    text: str


Part = Union[str, Heading, Picture, Code, Table]


def parts(summary: Dict[str, Any], pictures: Dict[str, str]) -> List[Part]:
    """What there is to say, in order; strings are paragraphs."""
    study = summary["study"]
    found: List[Part] = [study["about"]] if study["about"] else []
    found += [_what_ran(summary), tables.models(summary["variants"], study["baseline"])]
    if summary["ranking"]:
        found += [Heading("Ranking"), in_words(summary), tables.ranking(summary), RANKING]
    sections = {
        "ranking": ("last validation losses and their differences to the baseline", []),
        "curves": ("training and validation loss", [Heading("Loss"), CURVES]),
        "costs": ("speed and memory", [Heading("Speed and memory"), COSTS, tables.costs(summary)]),
        "heads": ("what the heads did", [Heading("Heads"), HEADS, tables.heads(summary), tables.findings(summary)]),
    }
    for name, (text, before) in sections.items():
        if name in pictures:
            found += [each for each in before if each is not None]
            found.append(Picture(pictures[name], text))
    if summary["not_finished"]:
        found += [Heading("Runs that have not finished"), _not_finished(summary)]
    return [*found, Heading("Settings that all share"), Code(yaml.safe_dump(study["settings"], sort_keys=True).strip())]


def in_words(summary: Dict[str, Any]) -> str:
    """What the ranking says."""
    rows, baseline = summary["ranking"], summary["study"]["baseline"]
    told = []
    for verdict, text in (("lower", "lower than"), ("higher", "higher than"), ("not decided", "not told apart from")):
        names = [row["variant"] for row in rows if row["verdict"] == verdict]
        if names:
            told.append(f"{text} {baseline}'s: {', '.join(names)}")
    lowest = f"Lowest mean: {rows[0]['variant']}, {rows[0]['mean']:.4f}."
    return f"{lowest} The loss is {'; '.join(told)}." if told else lowest


def _what_ran(summary: Dict[str, Any]) -> str:
    study, machine = summary["study"], summary["machine"]
    equal = f"Variants are made equal to {study['baseline']} in {study['at_equal']} by {study['adjust']}. "
    threads = " or ".join(map(str, summary["threads"])) or "no"
    return (
        f"{len(summary['variants'])} variants, seeds {', '.join(map(str, study['seeds']))}; runs: "
        f"{', '.join(f'{count} {status}' for status, count in summary['runs'].items())}. "
        f"{equal if study['at_equal'] else ''}Run on {machine['processor']}, threads of a process: {threads}, "
        f"torch {machine['torch']}."
    )


def _not_finished(summary: Dict[str, Any]) -> Table:
    rows = [
        [each["variant"], str(each["seed"]), each["status"], each["error"] or ""] for each in summary["not_finished"]
    ]
    return Table(["variant", "seed", "status", "why"], rows)


def write(results: Dict[str, Any], out: str) -> List[str]:
    """Write the summary, the pictures and the page of some results; returns their paths."""
    summary = summarise(results)
    files = [os.path.join(out, SUMMARY), os.path.join(out, PAGE)]
    pictures = draw(summary, out)
    _write(files[0], json.dumps(summary))
    _write(files[1], as_html(summary["study"]["name"], parts(summary, pictures)))
    return [*files, *pictures.values()]


def _write(path: str, text: str) -> None:
    with open(f"{path}.writing", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.writing", path)


def as_html(title: str, found: List[Part]) -> str:
    """One page, pictures inside."""
    body = "\n".join(_html(part) for part in found)
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n{body}\n</body></html>\n"
    )


def _html(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h2>{html.escape(part.text)}</h2>"
    if isinstance(part, Code):
        return f"<pre>{html.escape(part.text)}</pre>"
    if isinstance(part, Picture):
        with open(part.path, "rb") as file:
            image = base64.b64encode(file.read()).decode()
        return f'<p><img alt="{html.escape(part.text)}" src="data:image/png;base64,{image}"></p>'
    if isinstance(part, Table):
        rows = "\n".join(_cells("td", row) for row in part.rows)
        return f"<table>{_cells('th', part.head)}\n{rows}</table>"
    return f"<p>{html.escape(part)}</p>"


def _cells(tag: str, texts: Any) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"


def as_markdown(found: List[Part], level: int = 3) -> str:
    """For a page beside the pictures."""
    return "\n\n".join(_markdown(part, level) for part in found) + "\n"


def _markdown(part: Part, level: int) -> str:
    if isinstance(part, Heading):
        return f"{'#' * level} {part.text}"
    if isinstance(part, Code):
        return "\n".join(f"    {line}" for line in part.text.splitlines())
    if isinstance(part, Picture):
        return f"![{part.text}]({part.path})"
    if isinstance(part, Table):
        lines = [part.head, ["---"] * len(part.head), *part.rows]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return part


def show_plan(sweep: Sweep) -> None:
    """The models and the runs that a sweep would train, on the console."""
    variants = [
        {
            "name": each.name,
            "widths": each.widths,
            "parameters": each.parameters,
            "flops_per_token": each.flops_per_token,
            "memory_estimate_bytes": each.memory,
        }
        for each in sweep.planned
    ]
    _show(sweep.study.name, tables.models(variants, sweep.study.baseline))
    steps = sum(run.variant.train_iters for run in sweep.runs)
    print(f"{len(sweep.runs)} runs, {steps} steps in all, in {os.path.join(sweep.out, 'runs')}")


def show(results: Dict[str, Any]) -> None:
    """The ranking on the console."""
    summary = summarise(results)
    if summary["ranking"]:
        _show(summary["study"]["name"], tables.ranking(summary))
    for each in summary["not_finished"]:
        print(
            f"{each['variant']}, seed {each['seed']}: {each['status']}{': ' + each['error'] if each['error'] else ''}"
        )


def _show(title: str, table: Table) -> None:
    import sys

    shown = Shown(*table.head, title=title)
    for row in table.rows:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(shown)
