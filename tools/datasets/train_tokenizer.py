"""Trains a byte-level BPE tokenizer on text files, for tokenizer_type HFTokenizer."""

import argparse
import os
import sys

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)))

from megatron.errors import NeoXError  # noqa: E402
from megatron.tokenizer.train_tokenizer import train_tokenizer  # noqa: E402
from tools.datasets.text_files import find_input_files, read_documents  # noqa: E402


def get_args(input_args=None) -> argparse.Namespace:
    """Parse the command line (GPT-NeoX's options)."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--json_input_dir", required=True, help="folder of .jsonl or .txt files, or such files separated by commas")
    add("--tokenizer_output_path", required=True, help="the tokenizer.json to write")
    add("--tokenizer_type", default="BPE", choices=["BPE"])
    add("-v", "--vocab_size", type=int, default=52000, help="number of tokens (default: 52000)")
    return parser.parse_args(input_args)


def main(input_args=None) -> None:
    """Run the command line."""
    args = get_args(input_args)
    files = find_input_files(args.json_input_dir)
    texts = (document.texts["text"] for path in files for document in read_documents(path))
    size = train_tokenizer(texts, args.tokenizer_output_path, args.tokenizer_type, args.vocab_size)
    print(f"a tokenizer of {size} tokens in {args.tokenizer_output_path}")


if __name__ == "__main__":
    try:
        main()
    except NeoXError as error:
        sys.exit(f"error: {error}")
