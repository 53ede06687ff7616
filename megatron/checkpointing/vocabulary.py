"""The padding of vocabulary tables, which depends on the number of tensor-parallel ranks."""

from typing import Iterable, Optional

import torch

from megatron.errors import CheckpointError
from megatron.geometry import padded_vocab_size


def rows_at(
    tables: Iterable[torch.Tensor], divisible_by: int, old_ranks: int, new_ranks: int, vocab_size: Optional[int]
) -> int:
    """The padded vocabulary at `new_ranks` of tables [padded, h] that were padded for `old_ranks`.

    vocab_size: the tokens in use; None if unknown. Then the answer is sought without it: padding that only repeats a
    row is not counted, and where no number of tokens that leads to the old size would give another new size, it is
    that. Raises CheckpointError if the answer depends on it.
    """
    tables = list(tables)
    old = tables[0].shape[0]
    if vocab_size is not None:
        if vocab_size > old:
            raise CheckpointError(f"the vocabulary of {vocab_size} tokens is larger than the checkpoint's {old} rows")
        return padded_vocab_size(vocab_size, divisible_by, new_ranks)
    used = max(unpadded_rows(table) for table in tables)
    most = padded_vocab_size(used, divisible_by, new_ranks)
    least = padded_vocab_size(max(1, old - divisible_by * old_ranks + 1), divisible_by, new_ranks)
    if used == old and least < most:
        raise CheckpointError(
            f"the vocabulary is padded to {old} rows; at model_parallel_size={new_ranks} it has {least} to {most}, "
            "which depends on the number of tokens in use: give it with --vocab-size (the tokenizer is not here)"
        )
    return max(least, most)


def unpadded_rows(table: torch.Tensor) -> int:
    """Rows of a vocabulary table without those at the end that only repeat the one before them."""
    rows = table.shape[0]
    while rows > 1 and torch.equal(table[rows - 1], table[rows - 2]):
        rows -= 1
    return rows


def _padded(table: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - table.shape[0]
    return torch.cat([table, table[-1:].expand(missing, *table.shape[1:])]) if missing else table


def resize_vocabulary(table: torch.Tensor, rows: int, vocab_size: Optional[int], where: str) -> torch.Tensor:
    """A vocabulary table [padded, h] with another padding: [rows, h]; or a bias, [padded] and [rows].

    New rows repeat the last one: then no padding token can have a higher logit than every token had before, as rows
    of zeros could. Rows are cut only if they are known to be padding: beyond vocab_size, or such repetitions.

    Raises CheckpointError if rows would be lost that may be tokens.
    """
    if rows >= table.shape[0]:
        return _padded(table, rows)
    used = min(vocab_size or table.shape[0], unpadded_rows(table))
    if used > rows:
        known = f"the vocabulary has {used} tokens" if vocab_size else "the tokenizer is not known here"
        raise CheckpointError(f"{where}: {table.shape[0]} rows cannot be cut to {rows}, because {known}")
    return table[:rows].clone()
