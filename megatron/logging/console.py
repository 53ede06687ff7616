"""What a person sees while training: a progress bar on a terminal, plain lines elsewhere."""

import os
import sys
from datetime import timedelta
from typing import Any, Dict, List, Optional

_BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"


def short_number(value: float) -> str:
    """Three significant digits with k, M, G or T: 12345 -> '12.3k'."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def step_line(record: Dict[str, Any], train_iters: int) -> str:
    """One plain line for a logged step."""
    width = len(str(train_iters))
    parts = [f"iteration {record['iteration']:>{width}}/{train_iters}"] + _parts(record)
    remaining = (train_iters - record["iteration"]) * record["seconds"]
    parts.append(f"ETA {timedelta(seconds=round(remaining))}")
    return " | ".join(parts)


def _parts(record: Dict[str, Any]) -> List[str]:
    parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.3g}"]
    if record.get("grad_norm") is not None:
        parts.append(f"grad norm {record['grad_norm']:.3g}")
    if record.get("loss_scale") is not None:
        parts.append(f"loss scale {record['loss_scale']:.3g}")
    return parts + _speed(record) + [f"{record['seconds']:.3g} s/step"]


def _speed(record: Dict[str, Any]) -> List[str]:
    parts = [f"{record['skipped_steps']} skipped"] if record.get("skipped_steps") else []
    parts.append(f"{short_number(record['tokens_per_second'])} tokens/s")
    if record.get("tflops") is not None:
        parts.append(f"{record['tflops']:.3g} TFLOP/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    return parts


def bar_figures(record: Dict[str, Any]) -> str:
    """What fits beside a bar on 80 columns."""
    return ", ".join([f"loss {record['loss']:.4f}", f"lr {record['lr']:.3g}", *_speed(record)])


def _is_terminal(stream) -> bool:
    """A terminal that says its size; one that does not, as under some CI systems, cannot show a bar."""
    try:
        return stream.isatty() and all(os.get_terminal_size(stream.fileno()))
    except (OSError, ValueError, AttributeError):
        return False


class Console:
    """The bar moves at each step; its figures change at each logged step. Without a terminal each logged step is a
    line. `interactive` overrides the guess whether stdout is a terminal."""

    def __init__(self, train_iters: int, iteration: int = 0, interactive: Optional[bool] = None):
        self._train_iters = train_iters
        self._bar = None
        self._iteration = iteration
        if _is_terminal(sys.stdout) if interactive is None else interactive:
            from tqdm import tqdm

            stream = getattr(sys.stdout, "terminal", sys.stdout)
            self._bar = tqdm(total=train_iters, initial=iteration, dynamic_ncols=True, file=stream, bar_format=_BAR)

    def advance(self, iteration: int) -> None:
        """One more step is done."""
        if self._bar is not None:
            self._bar.update(iteration - self._iteration)
        self._iteration = iteration

    def step(self, record: Dict[str, Any]) -> None:
        """Show a logged step."""
        if self._bar is None:
            print(step_line(record, self._train_iters), flush=True)
            return
        self._bar.set_postfix_str(bar_figures(record), refresh=True)
        if hasattr(sys.stdout, "file_only"):
            sys.stdout.file_only(step_line(record, self._train_iters) + "\n")

    def message(self, text: str) -> None:
        """Print a line without tearing the bar."""
        if self._bar is None:
            print(text, flush=True)
            return
        self._bar.clear()
        print(text, flush=True)
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it stands; idempotent."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
