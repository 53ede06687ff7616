"""The page of the claims, written from the studies' figures alone."""

import json
import os
from typing import Any, Dict, List

from megatron.errors import DataError
from tools.head_dim.claims import pictures
from tools.head_dim.claims.claims import CLAIMS
from tools.head_dim.claims.verdict import Verdict, judge_all

DATA, PAGE = "claims.json", "claims.md"
HEAD = """# What wide heads are said to do, and what was seen here

<!-- written by python -m tools.head_dim claims --no-training --page docs; do not edit -->

An article on re-examining head dimension makes five claims about the width of attention heads. Each was tried here on
small models, with a number that is measured for each seed and a range in which the claim wants it, written down before
any of these numbers was known ([claims.py](../tools/head_dim/claims/claims.py)). Seen: the 95 % interval of the number
over the seeds (Student's t) lies in the range. Not seen: it lies outside. Else the claim is not decidable at this size,
with so many seeds.

"""
HOW = """
## How

    python -m tools.head_dim claims --jobs 2

trains all of it and writes the page, its pictures and its data; given again, it goes on where it was. The model
([model.yml](../tools/head_dim/claims/model.yml)) has 4 layers of 4 heads on a residual stream of 64, about 300,000
parameters, and is trained in fp32 for 200 steps of 1024 tokens of Python's own sources and help, with a vocabulary of
512. Losses are those of 16 batches held back, in nats per token; runs of one seed read the same texts in the same
order, so that differences are taken seed by seed. Speed is not measured: [scaling.md](scaling.md) has that.

What such models cannot say: how it is at a thousand times the size and a thousand times the text, with long texts, or
after the first 200 steps. Every study but that of the rates trains all widths at one learning rate, and in so few steps
narrow heads get further than wide ones (the losses in the tables): part of what is compared is how far training has
come. A claim that is seen here can fail elsewhere, and the other way round; "not seen" is said of these models only.
"""


def write(data: Dict[str, Any], folder: str) -> List[str]:
    """claims.json, claims.md and the pictures; returns their paths. data: {"machine", "studies": {study: figures}}."""
    os.makedirs(folder, exist_ok=True)
    verdicts = judge_all(data["studies"], CLAIMS)
    painted = [pictures.draw(each, data["studies"][each.claim.study], folder) for each in verdicts]
    contents = {**data, "verdicts": [each.to_dict() for each in verdicts]}
    texts = {DATA: json.dumps(contents, indent=1) + "\n", PAGE: page(data)}
    for name, text in texts.items():
        path = os.path.join(folder, name)
        with open(f"{path}.writing", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.writing", path)
    return [*(os.path.join(folder, name) for name in texts), *painted]


def read(folder: str) -> Dict[str, Any]:
    """What `write` was given. Raises DataError."""
    path = os.path.join(folder, DATA)
    try:
        with open(path, encoding="utf-8") as file:
            contents = json.load(file)
        return {"machine": contents["machine"], "studies": contents["studies"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no figures of claims can be read ({error!r})") from None


def page(data: Dict[str, Any]) -> str:
    """claims.md"""
    verdicts = judge_all(data["studies"], CLAIMS)
    summary = _table(
        [
            {
                "claim": each.claim.says,
                "verdict": f"**{each.verdict}**",
                "measured": _measured(each),
                "claimed": each.claim.wanted,
            }
            for each in verdicts
        ]
    )
    parts = [_section(each, data["studies"][each.claim.study]) for each in verdicts]
    machine = ", ".join(f"{key} {value}" for key, value in data["machine"].items() if value is not None)
    return f"{HEAD}{summary}\n{''.join(parts)}{HOW}\nMachine: {machine}.\n"


def _section(verdict: Verdict, study: Dict[str, Any]) -> str:
    claim = verdict.claim
    lines = [
        f"\n## {claim.says[0].upper()}{claim.says[1:]}\n",
        f"**{verdict.verdict.capitalize()}**{verdict.sentence[len(verdict.verdict) :]}\n",
        f"- From: {claim.source}.",
        f"- Wanted: {claim.wanted}; {claim.why}.",
        f"- Study: [{claim.study}.yml](../tools/head_dim/studies/{claim.study}.yml). {study['about']} "
        f"{len(study['seeds'])} seeds, {_done(study)}.",
        *(f"- Seed {seed} is left out: {reason}." for seed, reason in verdict.measured.left_out.items()),
        f"\n{_table(verdict.measured.rows)}\n![{claim.says}]({pictures.picture_name(verdict)})\n",
    ]
    return "\n".join(lines)


def _done(study: Dict[str, Any]) -> str:
    runs = study["runs"]
    finished = sum(run["status"] == "finished" for run in runs)
    return f"{finished} of {len(runs)} runs finished"


def _measured(verdict: Verdict) -> str:
    if verdict.interval is None:
        return f"{len(verdict.measured.effects)} seeds"
    low, high = verdict.interval
    return f"{verdict.mean:.3g} ({low:.3g} to {high:.3g})"


def _table(rows: List[Dict[str, Any]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([_shown(row.get(column)) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
