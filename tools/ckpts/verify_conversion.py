"""Is a checkpoint the same model as a Hugging Face folder? Exit code 0 if so, 1 if not.

    python tools/ckpts/verify_conversion.py --hf DIR --neox DIR [--text FILE | --random] [--tokens N] [--generate K]

Both run in fp32 on the CPU, one after the other; each takes 4 bytes a parameter. Printed are the largest and the mean
difference of the hidden states after every layer, of the logits, and of the tokens that both generate greedily. Where
they differ, the first place at which they do says where to look.
"""

import argparse
import os
import sys
from typing import Any, List, Optional, Sequence

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: no GPU is needed or used
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron.convert.verify import TOLERANCE, Generated, Place, Report, verify  # noqa: E402
from megatron.errors import ConversionError, DataError, NeoXError  # noqa: E402
from tools.ckpts.local_ranks import describe_process  # noqa: E402
from tools.options import at_least  # noqa: E402

RANDOM_ROWS = 2
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse(arguments)
    describe_process(0, 1)  # this is not a rank of the job in which it may have been started
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True)
    try:
        tokenizer = None if options.text is None else _tokenizer(options.hf)
        report = verify(
            options.hf,
            options.neox,
            lambda config: tokens_of(options, tokenizer, config),
            generate=options.generate,
            tolerance=options.tolerance,
            config_files=options.config_file,
            iteration=options.iteration,
            say=lambda text: print(text, file=sys.stderr),
        )
    except (NeoXError, OSError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    show(report, console, tokenizer)
    return 0 if report.agrees else 1


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", required=True, metavar="DIR", help="a folder that from_pretrained loads")
    parser.add_argument("--neox", required=True, metavar="DIR", help="a save folder, or one global_step<N> folder")
    parser.add_argument(
        "--config_file", "--config-file", nargs="+", default=(), metavar="YML", help="by default those in --neox"
    )
    parser.add_argument("--iteration", type=at_least(0), help="by default the one `latest` names")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="compare on the beginning of this text, and print its loss")
    source.add_argument(
        "--random", action="store_true", help=f"compare on {RANDOM_ROWS} rows of random tokens (the default)"
    )
    parser.add_argument("--tokens", type=at_least(1), metavar="N", help="tokens in a row (64, or the model's context)")
    parser.add_argument("--generate", type=at_least(0), default=16, metavar="K", help="tokens to generate (16)")
    parser.add_argument("--seed", type=int, default=1234, help="of the random tokens (1234)")
    parser.add_argument(
        "--tolerance",
        type=_positive,
        default=TOLERANCE,
        metavar="T",
        help=f"difference allowed, as a share of the largest value at the place, or of 1 ({TOLERANCE:g})",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} must be more than 0")
    return value


def _tokenizer(folder: str) -> Any:
    if not any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZERS):  # an empty one would be made
        raise ConversionError(f"{folder}: has no tokenizer for --text ({', '.join(TOKENIZERS)}); use --random")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of several libraries: unknown kinds, damaged files
        raise ConversionError(f"{folder}: its tokenizer cannot be loaded: {error}; use --random") from None


def tokens_of(options: argparse.Namespace, tokenizer: Any, config: Any) -> torch.Tensor:
    """Token ids [b, s] that both models get. Raises DataError for a text that cannot be read or is too short."""
    length = options.tokens or min(64, max(1, config.max_position_embeddings - options.generate))
    if tokenizer is None:
        generator = torch.Generator().manual_seed(options.seed)
        return torch.randint(0, config.vocab_size, (RANDOM_ROWS, length), generator=generator)
    try:
        with open(options.text, encoding="utf-8") as file:
            text = file.read(64 * length)  # no tokenizer has longer tokens, on average
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text {options.text}: cannot be read as UTF-8 ({error})") from None
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :length]
    if ids.shape[1] < (options.tokens or 2):
        raise DataError(f"--text {options.text}: has only {ids.shape[1]} tokens; --tokens {length} are wanted")
    return ids.long()


def show(report: Report, console: Console, tokenizer: Any = None) -> None:
    """The table and what follows from it."""
    console.print(table_of(report))
    console.print(report.description)
    if tokenizer is not None:
        console.print(f"loss of the text: transformers {report.losses[0]:.6f}, here {report.losses[1]:.6f} nats/token")
    for number, row in enumerate(report.rows):
        for line in generated_lines(number, row, tokenizer):
            console.print(line, markup=False)
    first = report.first_difference
    if first is not None:
        console.print(f"they first differ at: {first.name} ({first.largest:.3g}, allowed {first.allowed:.3g})")
    console.print(
        "the same model" if report.agrees else "NOT the same model", style="green" if report.agrees else "red"
    )


def table_of(report: Report) -> Table:
    """A line for each layer, with its attention beside it."""
    table = Table(title="transformers and this framework, fp32")
    for name in ("place", "largest value", "difference", "mean", "its attention"):
        table.add_column(name, justify="left" if name == "place" else "right")
    attention = {place.name: place for place in report.places if place.name.endswith(" attention")}
    rest = [place for place in report.places if place.name not in attention]
    for place in [*rest, *([report.generation] if report.generation else [])]:
        beside = attention.get(f"{place.name} attention")
        table.add_row(
            place.name,
            f"{place.magnitude:.4g}",
            _number(place),
            f"{place.mean:.1e}",
            "" if beside is None else _number(beside),
        )
    return table


def _number(place: Place) -> str:
    text = f"{place.largest:.1e}"
    return text if place.agrees else f"[red]{text} > {place.allowed:.1e}[/red]"


def generated_lines(number: int, row: Generated, tokenizer: Any) -> List[str]:
    """Both continuations of a row, or one if they are equal."""
    if row.step is None:
        return [f"row {number}: both generate {_text(row.theirs, tokenizer)}"]
    kind = "a tie" if row.agrees else "a difference"
    return [
        f"row {number}: {kind} at generated token {row.step}, where the logits are {row.margin:.2g} apart",
        f"  transformers: {_text(row.theirs, tokenizer)}",
        f"  here:         {_text(row.ours, tokenizer)}",
    ]


def _text(tokens: List[int], tokenizer: Any) -> str:
    return repr(tokenizer.decode(tokens)) if tokenizer is not None else " ".join(map(str, tokens))


if __name__ == "__main__":
    sys.exit(main())
