"""Prints how many tokens data sets have.

python tools/datasets/dataset_token_count.py data/pydocs/pydocs_text_document
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)))

from megatron.data.indexed_dataset import make_dataset  # noqa: E402
from megatron.errors import NeoXError  # noqa: E402


def main(input_args=None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_path", nargs="+", help="path of a data set without .bin and .idx")
    for prefix in parser.parse_args(input_args).data_path:
        dataset = make_dataset(prefix)
        print(f"{prefix}: {int(dataset.sizes.sum(dtype='int64'))} tokens in {len(dataset)} sequences")


if __name__ == "__main__":
    try:
        main()
    except NeoXError as error:
        sys.exit(f"error: {error}")
