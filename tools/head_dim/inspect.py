"""What do the heads of a checkpoint do with a text? Figures of each head, a picture, and what is unusual about them.

    python -m tools.head_dim inspect CHECKPOINT --text FILE [--out DIR] [--tokens N] [--no-gradients]

CHECKPOINT is a save folder or one global_step<N> folder in it, of any tensor and pipeline layout. It runs in fp32 on
the CPU, in one process: 4 bytes a parameter, 8 with gradients. DIR gets head_diagnostics.json, with the spectra, and
head_diagnostics.png. The same figures come from training itself with log_head_diagnostics.
"""

import argparse
import json
import os
import sys
from types import SimpleNamespace
from typing import Any, Dict, Tuple

from megatron.errors import ConfigError, DataError
from tools.options import at_least

TOKENIZER_SETTINGS = ("tokenizer_type", "vocab_file", "merge_file", "eod_token")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--text", required=True, metavar="FILE", help="the beginning of this text is what they read")
    parser.add_argument("--tokens", type=at_least(2), default=256, metavar="N", help="how much of it (256)")
    parser.add_argument("--iteration", type=at_least(0), help="by default the one `latest` names")
    parser.add_argument("--config-file", nargs="+", default=(), metavar="YML", help="by default those it keeps")
    parser.add_argument("--vocab-file", metavar="FILE", help="the tokenizer's, where the config names another place")
    parser.add_argument("--merge-file", metavar="FILE", help="likewise")
    parser.add_argument("--no-gradients", action="store_true", help="no backward pass: half the memory")
    parser.add_argument("--out", default="head_diagnostics", metavar="DIR", help="where to write (head_diagnostics)")
    parser.add_argument("--json", action="store_true", help="print the report, without spectra, as JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 0 however unusual the heads are: the rules are rules of thumb."""
    from megatron.head_diagnostics import findings
    from megatron.head_diagnostics.picture import draw_report

    report, loss = inspect(options)
    os.makedirs(options.out, exist_ok=True)
    files = [os.path.join(options.out, f"head_diagnostics.{ending}") for ending in ("json", "png")]
    found = findings(report)
    contents = {**report.to_dict(), "loss": loss, "findings": [vars(finding) for finding in found]}
    _write_json(files[0], contents)
    draw_report(report, files[1], f"{options.checkpoint}, {report.tokens} tokens, loss {loss:.4f}")
    if options.json:
        for layer in contents["layers"]:
            layer["spectra"] = {}
        json.dump(contents, sys.stdout, indent=1)
        print()
        return 0
    _show(report, loss)
    print("\n".join(str(finding) for finding in found) or "nothing unusual by these rules")
    print(f"written: {', '.join(files)}")
    return 0


def inspect(options: argparse.Namespace) -> Tuple[Any, float]:
    """(HeadReport, loss of the text in nats per token). Raises ConfigError, CheckpointError or DataError."""
    import torch

    from megatron.checkpointing.model_settings import checkpoint_folder, config_paths, inference_args
    from megatron.checkpointing.reader import CheckpointReader
    from megatron.checkpointing.weights import load_weights_from
    from megatron.head_diagnostics import HeadDiagnostics
    from megatron.logging.quiet import quiet_libraries, without_library_prints
    from megatron.model.gpt2_model import GPT2ModelSequential, masked_cross_entropy
    from megatron.neox_arguments.loading import load_files

    reader = CheckpointReader(checkpoint_folder(options.checkpoint, options.iteration))
    settings = load_files(options.config_file or config_paths(reader.folder))[0]
    args = inference_args(reader, options.config_file, 1, "fp32", options.tokens)
    ids = _token_ids(options, settings, min(options.tokens, args.seq_length) + 1, args.padded_vocab_size)
    quiet_libraries(args)
    with without_library_prints(args):
        model = GPT2ModelSequential(args)
    diagnostics = HeadDiagnostics(model, tokens=ids.shape[1] - 1, spectra=True)
    load_weights_from(args, model, reader.folder)
    model.eval()  # no dropout
    diagnostics.begin()
    tokens, labels = ids[:, :-1], ids[:, 1:]
    with torch.set_grad_enabled(not options.no_gradients):
        logits = model((tokens, torch.arange(tokens.shape[1]).unsqueeze(0)))
        loss = masked_cross_entropy(logits, (labels, torch.ones_like(labels, dtype=torch.float32)))
    if not options.no_gradients:
        loss.backward()
    diagnostics.measure(gradients=not options.no_gradients)
    return diagnostics.report(reader.iteration), float(loss)


def _token_ids(options: argparse.Namespace, settings: Dict[str, Any], count: int, vocabulary: int):
    """int64 [1, count], or fewer if the text is shorter."""
    import torch

    from megatron.tokenizer.tokenizer import build_tokenizer

    wanted = {name: settings.get(name) for name in TOKENIZER_SETTINGS}
    wanted.update({key: value for key in ("vocab_file", "merge_file") if (value := getattr(options, key))})
    if wanted["tokenizer_type"] is None:
        raise ConfigError(
            "tokenizer_type is not in the checkpoint's config; name a YAML that has it with --config-file"
        )
    try:
        with open(options.text, encoding="utf-8") as file:
            text = file.read(64 * count)  # no tokenizer has longer tokens, on average
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text {options.text}: cannot be read as UTF-8 ({error})") from None
    ids = build_tokenizer(SimpleNamespace(**wanted, rank=0)).tokenize(text)[:count]
    if len(ids) < 3:
        raise DataError(f"--text {options.text}: has only {len(ids)} tokens; give a longer text")
    if max(ids) >= vocabulary:
        raise DataError(
            f"--text {options.text}: token {max(ids)} is outside the model's vocabulary of {vocabulary}: this is not "
            "its tokenizer"
        )
    return torch.tensor([ids])


def _show(report: Any, loss: float) -> None:
    """A line for each layer: the mean over its heads."""
    from rich.console import Console
    from rich.table import Table

    shown = [name for name in report.names() if name not in ("entropy", "qk_norm", "ov_norm")]
    title = f"{report.tokens} tokens, loss {loss:.4f} nats per token; means over the heads of a layer"
    table = Table("layer", *(name.replace("_", " ") for name in shown), title=title)
    for layer in report.layers:
        means = (sum(layer.figures[name]) / len(layer.figures[name]) for name in shown)
        table.add_row(str(layer.layer), *(f"{mean:.3g}" for mean in means))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _write_json(path: str, contents: Dict[str, Any]) -> None:
    temporary = f"{path}.writing"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(contents, file)
    os.replace(temporary, path)
