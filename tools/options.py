"""Types of command-line options that several tools share."""

import argparse


def at_least(least: int):
    """A type for whole numbers."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} must be {least} or more")
        return value

    return number
