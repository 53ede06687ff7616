"""Command-line options that several tools share, and their types."""

import argparse


def at_least(least: int):
    """A type for whole numbers."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} must be {least} or more")
        return value

    return number


def checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Which settings and which iteration of a checkpoint are meant."""
    parser.add_argument(
        "--config_file", "--config-file", nargs="+", default=(), metavar="YML", help="by default the checkpoint's own"
    )
    parser.add_argument("--iteration", type=at_least(0), help="by default the one `latest` names")
