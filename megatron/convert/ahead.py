"""One piece of work ahead: the disk is read while it is written."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, Hashable, Sequence


class Ahead:
    """`function`, for items asked for in order: while one result is used, the next is worked out in a thread.

    So two results are in memory at a time. Errors of `function` come when its item is asked for.
    """

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Hashable]):
        self._function = function
        self._next = dict(zip(items, items[1:], strict=False))
        self._started: Dict[Hashable, Future] = {}
        self._pool = ThreadPoolExecutor(max_workers=1)

    def __call__(self, item: Hashable) -> Any:
        """The result for one item; each can be had once."""
        self._start(item)
        result = self._started.pop(item).result()
        if item in self._next:
            self._start(self._next[item])
        return result

    def _start(self, item: Hashable) -> None:
        if item not in self._started:
            self._started[item] = self._pool.submit(self._function, item)
