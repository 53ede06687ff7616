"""Joins all data sets of a folder, in the order of their names, into one.

python tools/datasets/merge_datasets.py --input data/parts --output-prefix data/whole
"""

import argparse
import glob
import os
import sys

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)))

from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder, make_dataset  # noqa: E402
from megatron.errors import DataError, NeoXError  # noqa: E402


def merge(folder: str, output_prefix: str) -> int:
    """Write OUTPUT_PREFIX.bin and .idx; returns the number of data sets joined.

    Raises DataError for a folder without data sets, a file without its partner, or item types that differ.
    """
    files = glob.glob(os.path.join(folder, "*.idx")) + glob.glob(os.path.join(folder, "*.bin"))
    prefixes = sorted({os.path.splitext(path)[0] for path in files} - {output_prefix})
    if not prefixes:
        raise DataError(f"--input {folder}: no .bin and .idx files there")
    builder = MMapIndexedDatasetBuilder(f"{output_prefix}.bin", make_dataset(prefixes[0]).dtype)
    try:
        for prefix in prefixes:
            builder.merge_file_(prefix)
        builder.finalize(f"{output_prefix}.idx")
    except BaseException:
        builder.abandon()
        raise
    return len(prefixes)


def main(input_args=None) -> None:
    """Run the command line (GPT-NeoX's options)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="folder of the .bin and .idx files")
    parser.add_argument("--output-prefix", required=True, help="path of the output without .bin and .idx")
    args = parser.parse_args(input_args)
    count = merge(args.input, args.output_prefix)
    print(f"{count} data sets joined in {args.output_prefix}.bin and .idx")


if __name__ == "__main__":
    try:
        main()
    except NeoXError as error:
        sys.exit(f"error: {error}")
