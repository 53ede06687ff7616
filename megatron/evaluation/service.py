"""One rank runs the evaluation and asks; all ranks answer together.

The evaluation harness loads data, counts and writes, which one process should do; the model needs all of them.
"""

import queue
import threading
from typing import Any, Callable, Optional

import torch.distributed as dist

from megatron.text_generation.collective import from_rank_0_when_ready, is_rank_0

Call = Callable[..., Any]


def with_all_ranks(program: Callable[[Call], Any], perform: Call) -> Optional[Any]:
    """Run program(call) on rank 0; each call(...) in it is perform(...) on all ranks at once. All ranks must call it.

    Returns the program's result on rank 0 and None on the others. A NeoXError of either is raised on every rank. The
    program may take as long as it likes between two calls: see `from_rank_0_when_ready`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return program(perform)
    desk = _Desk(program) if is_rank_0() else None
    while True:
        request = from_rank_0_when_ready(lambda: desk.next_request())
        if request is None:
            return None if desk is None else desk.result
        answer = perform(*request)
        if desk is not None:
            desk.answer(answer)


class _Desk:
    """Runs the program in a thread of its own, which waits at each call for the answer of the thread of the ranks."""

    def __init__(self, program: Callable[[Call], Any]):
        self.result: Any = None
        self._error: Optional[BaseException] = None
        self._requests: queue.Queue = queue.Queue()
        self._answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._run, args=(program,), daemon=True).start()

    def _run(self, program: Callable[[Call], Any]) -> None:
        try:
            self.result = program(self._call)
        except BaseException as error:  # raised again by next_request, on the thread of the ranks
            self._error = error
        self._requests.put(None)

    def _call(self, *request: Any) -> Any:
        self._requests.put(request)
        return self._answers.get()

    def next_request(self) -> Optional[tuple]:
        """The arguments of the next call; None when the program is done. Raises the program's error."""
        request = self._requests.get()
        if request is None and self._error is not None:
            raise self._error
        return request

    def answer(self, value: Any) -> None:
        self._answers.put(value)
