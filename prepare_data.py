"""Makes a data set ready for training.

    python prepare_data.py pydocs -d data

writes data/pydocs/pydocs_text_document.{bin,idx} and, as no tokenizer is given, trains data/pydocs/tokenizer.json.
"""

import argparse
import os

from megatron.entry import run_main


def get_args(input_args=None) -> argparse.Namespace:
    """Parse the command line: GPT-NeoX's options, and those for what it would download."""
    from megatron.tokenizer import TOKENIZERS
    from tools.datasets.corpora import PYDOCS, PYDOCS_BYTES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("dataset", nargs="?", default=PYDOCS, help=f"{PYDOCS}, or a .jsonl or .txt file, or a folder of them")
    add("-t", "--tokenizer", default="HFTokenizer", choices=list(TOKENIZERS), help="default: HFTokenizer")
    add("-d", "--data-dir", default=os.environ.get("DATA_DIR", "data"), help="output folder (default: $DATA_DIR, data)")
    add("-v", "--vocab-file", help="the tokenizer's vocabulary; without it, HFTokenizer is trained on the data")
    add("-m", "--merge-file", help="the tokenizer's merges, for GPT2BPETokenizer")
    add("-f", "--force", "--force-redownload", action="store_true", help="make it again even if it is there")
    add("--vocab-size", type=int, default=4096, help="tokens of a tokenizer trained here (default: 4096)")
    add(
        "--max-bytes",
        type=int,
        help=f"most bytes of text to take (default: {PYDOCS_BYTES} for {PYDOCS}, everything for files)",
    )
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes that tokenize (default: one for each core)")
    return parser.parse_args(input_args)


def main(input_args=None) -> None:
    """Run the command line."""
    from tools.datasets.corpora import Preparation, prepare_dataset

    args = get_args(input_args)
    preparation = Preparation(
        dataset=args.dataset,
        tokenizer_type=args.tokenizer,
        data_dir=args.data_dir,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
        max_bytes=args.max_bytes,
        workers=args.workers,
        force=args.force,
    )
    if not prepare_dataset(preparation):
        print(f"> {preparation.folder} is complete already (--force makes it again)")
    print(f"> in a config: data_path: {preparation.data_path}")
    print(f">              tokenizer_type: {preparation.tokenizer_type}")
    if preparation.tokenizer_file:
        print(f">              vocab_file: {preparation.tokenizer_file}")


if __name__ == "__main__":
    run_main(main)
