"""What torch's CPU allocator gives out."""

from typing import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], None]) -> int:
    """Allocated bytes at most while `run` runs, beyond what was there; copies that operations make inside are seen."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    live = peak = 0
    events = profiler.profiler.kineto_results.events()
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        peak = max(peak, live)
    return peak
