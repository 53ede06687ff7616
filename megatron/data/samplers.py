"""Which samples a data-parallel rank reads, micro-batch by micro-batch."""

from typing import Iterator, List


class DistributedBatchSampler:
    """Micro-batches of one rank, in order, from `start` on.

    Micro-batch k of the whole run is samples [k * B * D, (k + 1) * B * D) for B samples a rank and D ranks; rank r
    takes the r-th slice of B. So the samples of an optimizer step do not depend on D for a fixed global batch.
    What is left at the end and fills no micro-batch on every rank is dropped.
    """

    def __init__(self, num_samples: int, micro_batch_size: int, rank: int, world_size: int, start: int = 0):
        self.num_samples = num_samples
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.start = start

    def __len__(self) -> int:
        """Micro-batches in one pass over the samples."""
        return self.num_samples // (self.micro_batch_size * self.world_size)

    def __iter__(self) -> Iterator[List[int]]:
        for number in range(self.start, len(self)):
            first = (number * self.world_size + self.rank) * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))
