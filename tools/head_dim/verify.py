"""Is this the geometry that it should be? Compares a model with published ones, and checks its head_dim.

    python -m tools.head_dim verify CONFIG.yml [MORE.yml ...]
    python -m tools.head_dim verify HF_DIR              (or a config.json)
    python -m tools.head_dim verify CHECKPOINT          (a save folder, or one global_step<N> in it)

Exit status for CI: 0 fine, 1 if the model differs from the published one that it is nearest to or a check fails (with
--expect NAME: if it is not that model), 2 if it cannot be read.
"""

import argparse
import json
import sys
from typing import Any, Dict, List, Optional

from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry
from megatron.mixed_geometry import AnyHeadGeometry
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.equal_widths import by_layer_text, of_groups, one_or_each, one_or_list, softmax_scales
from megatron.neox_arguments.widths import named_layers
from tools.head_dim import published
from tools.head_dim.subject import Subject, read_subject

TP_SIZES = (1, 2, 4, 8)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="YAML files, a Hugging Face folder, or a checkpoint")
    parser.add_argument("--expect", metavar="NAME", help="the published model that it must be, e.g. Qwen3-4B")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 0 if all is fine, else 1."""
    expected = published.named(options.expect) if options.expect else None
    if options.expect and expected is None:
        names = ", ".join(model.name for model in published.models())
        raise ConfigError(f"--expect {options.expect}: no published model of that name; known are {names}")
    report = report_on(read_subject(options.paths), expected)
    if options.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        print("\n".join(_lines(report)))
    return 0 if report["ok"] else 1


def report_on(subject: Subject, expected: Optional[published.Published] = None) -> Dict[str, Any]:
    """All that is found: model (the nearest), verdict, differences, problems, notes, tensor_parallel, ok."""
    model = expected or published.closest(subject.numbers)
    differing = published.differences(subject.numbers, model) if model else []
    others = published.differences(subject.numbers, model, published.OTHERS) if model else []
    problems = [
        *subject.problems,
        *_quotient_problem(subject, model),
        *_function_problems(subject, model, differing),
        *_backend_problems(subject),
    ]
    return {
        "subject": subject.name,
        "kind": subject.kind,
        "numbers": subject.numbers,
        "model": model.name if model else None,
        "source": model.source if model else None,
        "verdict": _verdict(model, differing),
        "differences": differing,
        "other_differences": _without_padding(others, subject, model),
        "problems": problems,
        "notes": [*subject.notes, *_notes(subject, model)],
        "tensor_parallel": _splits(subject),
        "ok": not differing and not problems,
    }


def _verdict(model: Optional[published.Published], differing: List[str]) -> str:
    if model is None:
        return "no published model is near"
    return f"{model.name}, but {'; '.join(differing)}" if differing else f"this is {model.name}"


def _quotient_problem(subject: Subject, model: Optional[published.Published]) -> List[str]:
    """The fault this tool is there for: a head_dim that was forgotten, so that the quotient took its place."""
    width, hidden, heads = (subject.numbers.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if model is None or type(width) is not int or width == model.number("head_dim") or subject.problems:
        return []
    try:
        quotient = HeadGeometry.from_config(hidden, heads).head_dim
    except ConfigError:
        return []
    if width != quotient:
        return []
    published_width = by_layer_text(model.number("head_dim"))
    return [f"head_dim is {width}, the quotient of hidden_size and heads; {model.name} has {published_width}: set it"]


def _function_problems(subject: Subject, model: Optional[published.Published], differing: List[str]) -> List[str]:
    """What the published model computes otherwise, at the same widths: norms on q and k, the scale of the scores."""
    if subject.args is None or model is None or differing:
        return []
    layer, problems = subject.args.layer_attention(0), []
    if layer.qk_norm != model.qk_norm_type:
        problems.append(f"qk_norm_type is {layer.qk_norm}: {model.name} has {model.qk_norm_type} ({model.qk_norm})")
    scale, ours = model.softmax_scale, [softmax_scales(subject.args, n) for n in range(subject.args.num_layers)]
    if scale is not None and any(abs(each - scale) > 1e-6 * scale for each in _all(ours)):
        shown = by_layer_text(_scales(subject.args))
        problems.append(f"the softmax scale is {shown}: {model.name} has {scale:.6g}")
    return problems


def _scales(args: NeoXArgs) -> Any:
    """The softmax scale, or those of all layers, rounded for print."""
    return one_or_list([_rounded(softmax_scales(args, number)) for number in range(args.num_layers)])


def _rounded(scale: Any) -> Any:
    return tuple(map(_rounded, scale)) if isinstance(scale, tuple) else float(f"{scale:.6g}")


def _all(value: Any) -> List[float]:
    """The numbers of all layers and groups."""
    return [number for each in value for number in _all(each)] if isinstance(value, (list, tuple)) else [value]


def _backend_problems(subject: Subject) -> List[str]:
    """Backends that the config names by itself and that cannot run it, on the device they are meant for."""
    if subject.args is None:
        return []
    asked = {kind for kind in subject.args.attention_config if kind != "auto"}
    if not asked:
        return []
    from tools.head_dim.backends import verdicts  # imports torch

    precision = "fp32" if subject.args.precision == "fp32" else "bfloat16"
    rows = [row for row in verdicts(subject.args) if row.backend in asked and row.precision == precision]
    able = {row.backend for row in rows if row.runs}
    return [
        f"attention_config={row.backend} on {row.device}: {row.note}"
        for row in rows
        if row.backend not in able and row.device == "cuda"
    ]


def _notes(subject: Subject, model: Optional[published.Published]) -> List[str]:
    notes = []
    if model is not None and model.unverified_fields:
        notes.append(f"of {model.name}, these have no source: {', '.join(model.unverified_fields)}")
    if model is not None and not model.can_be_held:
        notes.append(f"{model.name}'s layers differ as no config here can hold them: {model.notes}")
    if model is not None and model.attention_scale_override:
        notes.append(f"{model.name}'s scores: {model.attention_scale_override}")
    if subject.args is not None:
        notes.append(_scale_note(subject.args))
    return notes


def _scale_note(args: NeoXArgs) -> str:
    usual = one_or_each(args, lambda geometry: of_groups(geometry, lambda group: _rounded(group.default_softmax_scale)))
    word = "the default" if usual == _scales(args) else f"not head_dim ** -0.5 = {by_layer_text(usual)}"
    return f"softmax scale {by_layer_text(_scales(args))}, {word}"


def _splits(subject: Subject) -> Dict[str, str]:
    """By tensor-parallel size: heads of a rank, or why it does not work."""
    if subject.args is None:
        return {}
    result = {}
    for size in TP_SIZES:
        texts: Dict[str, List[int]] = {}
        for geometry, numbers in subject.args.layers_by_geometry().items():
            texts.setdefault(_split(geometry, size), []).extend(numbers)
        result[str(size)] = "; ".join(named_layers(texts, subject.args.num_layers))
    return result


def _split(geometry: AnyHeadGeometry, size: int) -> str:
    problems = geometry.shard_problems(size)
    if problems:
        return "; ".join(problems)
    texts = []
    for group in geometry.groups:
        part, shared = group.shard(size), group.kv_replicas(size)
        width = f" of {group.head_dim}" if len(geometry.groups) > 1 else ""
        word = f", each on {shared} ranks" if shared > 1 else ""
        texts.append(f"{part.num_attention_heads} heads and {part.num_kv_heads} kv heads{width} a rank{word}")
    return " + ".join(texts)


def _without_padding(lines: List[str], subject: Subject, model: Optional[published.Published]) -> List[str]:
    """A vocabulary that was padded by less than 1 % is the published one."""
    rows = subject.numbers.get("vocab_size")
    padded = model is not None and rows is not None and 0 <= rows - model.vocab_size < 0.01 * model.vocab_size
    return [line for line in lines if not (padded and line.startswith("vocab_size"))]


def _lines(report: Dict[str, Any]) -> List[str]:
    numbers = ", ".join(
        f"{key} {by_layer_text(value)}" for key, value in report["numbers"].items() if value is not None
    )
    lines = [f"{report['subject']} ({report['kind']}): {report['verdict']}", f"  {numbers}"]
    lines += [f"  problem: {problem}" for problem in report["problems"]]
    lines += [f"  also differs: {line}" for line in report["other_differences"]]
    lines += [f"  tensor parallel {size}: {text}" for size, text in report["tensor_parallel"].items()]
    lines += [f"  note: {note}" for note in report["notes"]]
    return lines + ([f"  published: {report['source']}"] if report["source"] else [])
