"""What do the heads of a checkpoint do with a text? Figures of each head, a picture, and what is unusual about them.

    python -m tools.head_dim inspect CHECKPOINT --text FILE [--out DIR] [--tokens N] [--no-gradients]
    python -m tools.head_dim inspect HF_DIR --text FILE

CHECKPOINT is a save folder or one global_step<N> folder in it, of any tensor and pipeline layout; HF_DIR a Hugging Face
folder, converted into a temporary folder (TMPDIR) first. It runs in fp32 on the CPU, in one process: 4 bytes a
parameter, 8 with gradients. DIR gets head_diagnostics.json, with the spectra, and head_diagnostics.png. The same
figures come from training itself with log_head_diagnostics.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import contextmanager, nullcontext, redirect_stdout
from types import SimpleNamespace
from typing import Any, Dict, Iterator, Tuple

from megatron.errors import CheckpointError, ConfigError, DataError
from tools.head_dim.configs import CONFIG_JSON
from tools.options import at_least

TOKENIZER_SETTINGS = ("tokenizer_type", "vocab_file", "merge_file", "eod_token")
TOKENS = 256
"""Looked at unless --tokens says otherwise: the matrices are as large as its square."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a Hugging Face folder")
    parser.add_argument("--text", required=True, metavar="FILE", help="the beginning of this text is what they read")
    parser.add_argument("--tokens", type=at_least(2), metavar="N", help="how much of it (256, or seq_length)")
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
    from megatron.head_diagnostics.report import plain

    # What the loading prints is not part of the JSON.
    aside = redirect_stdout(sys.stderr) if options.json else nullcontext()
    with aside, _checkpoint_of(options) as folder:
        report, loss = inspect(options, folder)
    files = [os.path.join(options.out, f"head_diagnostics.{ending}") for ending in ("json", "png")]
    found = findings(report)
    contents = plain({**report.to_dict(), "loss": loss, "findings": [vars(finding) for finding in found]})
    _write_json(files[0], contents)
    draw_report(report, files[1], f"{options.checkpoint}: {report.tokens} tokens, loss {loss:.4f}")
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


@contextmanager
def _checkpoint_of(options: argparse.Namespace) -> Iterator[str]:
    """The checkpoint that is asked about; one made of it while this lasts, where it is a Hugging Face folder."""
    path = options.checkpoint
    if not os.path.exists(path):
        raise CheckpointError(f"{path}: no such folder")
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is a file: name the folder of a checkpoint, or a Hugging Face folder")
    if not os.path.isfile(os.path.join(path, CONFIG_JSON)):
        yield path
        return
    from megatron.convert.importing import import_hf

    with tempfile.TemporaryDirectory(prefix="inspect-") as temporary:
        imported = os.path.join(temporary, "checkpoint")
        # No padding: rows of no token would be part of the loss.
        import_hf(path, imported, make_vocab_size_divisible_by=1, progress=sys.stderr.isatty())
        yield imported


def inspect(options: argparse.Namespace, folder: str) -> Tuple[Any, float]:
    """(HeadReport, loss of the text in nats per token); makes options.out. Raises ConfigError, CheckpointError or
    DataError."""
    from megatron.checkpointing.adapters import refuse_adapters
    from megatron.checkpointing.model_settings import checkpoint_folder
    from megatron.checkpointing.reader import CheckpointReader
    from megatron.checkpointing.weights import load_weights_from
    from megatron.head_diagnostics import HeadDiagnostics
    from megatron.logging.quiet import quiet_libraries, without_library_prints
    from megatron.model.gpt2_model import GPT2ModelSequential

    reader = CheckpointReader(checkpoint_folder(folder, options.iteration))
    refuse_adapters(reader)
    args = _arguments_of(reader, options)
    ids = _token_ids(options, reader, args)
    os.makedirs(options.out, exist_ok=True)  # before the work that would be lost
    quiet_libraries(args)
    with without_library_prints(args):
        model = GPT2ModelSequential(args)
    diagnostics = HeadDiagnostics(model, tokens=ids.shape[1] - 1, spectra=True)
    load_weights_from(args, model, reader.folder)
    model.eval()  # no dropout
    diagnostics.begin()
    loss = _run(model, ids, backward=not options.no_gradients)
    diagnostics.measure(gradients=not options.no_gradients)
    return diagnostics.report(reader.iteration), loss


def _arguments_of(reader: Any, options: argparse.Namespace) -> Any:
    from megatron.checkpointing.model_settings import inference_args

    args = inference_args(reader, options.config_file, 1, "fp32")
    most = max(args.seq_length, args.max_position_embeddings)
    if (options.tokens or 0) > most:
        raise ConfigError(f"--tokens {options.tokens}: the model has {most} positions; give {most} or fewer")
    return inference_args(reader, options.config_file, 1, "fp32", options.tokens or 1)


def _run(model: Any, ids: Any, backward: bool) -> float:
    """The loss of ids [1, tokens + 1]. Raises CheckpointError where it is not finite."""
    import torch

    from megatron.model.gpt2_model import masked_cross_entropy

    tokens, labels = ids[:, :-1], ids[:, 1:]
    with torch.set_grad_enabled(backward):
        logits = model((tokens, torch.arange(tokens.shape[1]).unsqueeze(0)))
        loss = masked_cross_entropy(logits, (labels, torch.ones_like(labels, dtype=torch.float32)))
    if not loss.isfinite():
        raise CheckpointError(f"the loss of the text is {loss.item()}: look at an earlier checkpoint (--iteration)")
    if backward:
        loss.backward()
    return loss.item()


def _token_ids(options: argparse.Namespace, reader: Any, args: Any):
    """int64 [1, tokens + 1], or fewer if the text is shorter."""
    import torch

    from megatron.checkpointing.model_settings import config_paths
    from megatron.neox_arguments.loading import load_files
    from megatron.tokenizer.tokenizer import build_tokenizer

    settings = load_files(options.config_file or config_paths(reader.folder))[0]
    wanted = {name: settings.get(name) for name in TOKENIZER_SETTINGS}
    wanted.update({key: value for key in ("vocab_file", "merge_file") if (value := getattr(options, key))})
    if wanted["tokenizer_type"] is None:
        raise ConfigError(
            "tokenizer_type is not in the checkpoint's config; name a YAML that has it with --config-file"
        )
    count = (options.tokens or min(TOKENS, args.seq_length)) + 1
    text = _beginning(options.text, 64 * count)  # no tokenizer has longer tokens, on average
    ids = build_tokenizer(SimpleNamespace(**wanted, rank=0)).tokenize(text)[:count]
    if len(ids) < 3:
        raise DataError(f"--text {options.text}: has only {len(ids)} tokens; give a longer text")
    if max(ids) >= args.padded_vocab_size:
        raise DataError(
            f"--text {options.text}: token {max(ids)} is outside the model's vocabulary of {args.padded_vocab_size}: "
            "this is not its tokenizer"
        )
    return torch.tensor([ids])


def _beginning(path: str, characters: int) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(characters)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text {path}: cannot be read as UTF-8 ({error})") from None


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
