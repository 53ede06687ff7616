"""Whether a source holds exactly the tensors that its weight table asks for."""

import re
from typing import List, Sequence, Tuple

import torch

from megatron.convert.families import Family
from megatron.convert.hf_source import HFSource
from megatron.convert.precision import dtype_problems
from megatron.convert.rules import EMBEDDING, HEAD, Line
from megatron.errors import ConversionError

_BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)")
"""Rotary frequencies and causal masks that some versions saved; the config says all there is in them."""


def check_source(
    source: HFSource, family: Family, neox_args, lines: Sequence[Line], wanted: torch.dtype = None
) -> List[str]:
    """Compare names, shapes and dtypes; returns what there is to say about tensors that are left out.

    A tied model's output layer may be there too, if it equals the embedding. Raises ConversionError with every
    problem.
    """
    shapes = {name: shape for line in lines for name, shape in zip(line.theirs, line.shapes, strict=True)}
    names = set(source.names())
    problems = [f"{name}: missing" for name in shapes if name not in names]
    for name, shape in shapes.items():
        if name in names and source.shape(name) != shape:
            problems.append(f"{name}: shape {list(source.shape(name))}, where the config makes it {list(shape)}")
    problems += dtype_problems(((name, source.dtype(name)) for name in shapes if name in names), wanted)
    extra = sorted(names - set(shapes))
    unused = [name for name in extra if _BUFFERS.fullmatch(name)]
    notes = [f"{len(unused)} buffers that hold no weights are left out ({unused[0]}, ...)"] if unused else []
    if source.other_parts:
        notes.append(
            f"only the language model is taken: {len(source.other_parts)} tensors of other parts are left out "
            f"({source.other_parts[0]}, ...)"
        )
    copy, table = _tied_head(family, neox_args)
    for name in sorted(set(extra) - set(unused)):
        if name != copy or table not in names:
            problems.append(f"{name}: not used by a {family.architecture} with this config")
        elif source.shape(name) == source.shape(table) and torch.equal(source.read(name), source.read(table)):
            notes.append(f"{name} is left out: it equals {table}, to which the config ties it")
        else:
            problems.append(
                f"{name}: differs from {table}, to which the config ties it; if it is the model's output layer, set "
                "tie_word_embeddings to false in config.json, else remove it"
            )
    if problems:
        raise ConversionError(_listed(source.folder, problems))
    return notes


def _tied_head(family: Family, neox_args) -> Tuple[str, str]:
    """Their names of the output layer that a tied model does not have, and of the embedding; empty if untied."""
    if neox_args.no_weight_tying:
        return "", ""
    untied = family.rules(neox_args.update(no_weight_tying=True))
    tables = {rule.part: rule.theirs for rule in untied if isinstance(rule.theirs, str) and rule.shapes == "v h"}
    return tables.get(HEAD, ""), tables.get(EMBEDDING, "")


def _listed(folder: str, problems: List[str]) -> str:
    listed = "\n".join(f"  {problem}" for problem in problems)
    return f"{folder} does not hold the tensors that its config.json asks for:\n{listed}"
