"""How a script ends: an error that is the user's to fix is printed once, without a traceback, and gives exit code 1."""

import os
import signal
import sys
import time
from typing import Any, Callable

from megatron.errors import NeoXError

EXIT_CODE = 1
_REQUIRED = ("torch", "deepspeed", "numpy", "yaml", "tokenizers", "tqdm", "rich", "matplotlib", "safetensors")
"""What requirements/requirements.txt installs, by the names that are imported."""
_WAIT_FOR_RANK_0 = 5.0
"""Seconds. DeepSpeed's launcher looks for failed processes every second and ends the others."""


def run_main(main: Callable[[], Any], computes: bool = False) -> None:
    """Call main(); turn NeoXError into one line on stderr and exit code 1.

    A program that `computes` takes and frees the same memory at every step: see allocator.py.

    Where several processes run, all of them usually meet the same error: rank 0 prints it, the others wait to be
    ended by the launcher. One that is still alive after that met an error of its own, and prints it.
    """
    try:
        if computes:
            _keep_large_blocks()
        main()
        _close_process_groups()
    except NeoXError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        if error.name not in _REQUIRED:
            raise
        _fail(
            f"the package {error.name} is not installed for {sys.executable}; use .venv/bin/python, which `make setup` "
            "makes, or install requirements/requirements.txt"
        )
    except BrokenPipeError:  # whoever reads the output, such as `head`, has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush fails once more
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _keep_large_blocks() -> None:
    from megatron.allocator import keep_large_blocks

    keep_large_blocks()


def _close_process_groups() -> None:
    """A process that ends with its groups open can be aborted by their threads, after all its work was done."""
    distributed = sys.modules.get("torch.distributed")  # not imported here: torch takes seconds
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _fail(error: Any) -> None:
    rank, world_size = _rank_and_world_size()
    if rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_WAIT_FOR_RANK_0)
    where = f" (rank {rank})" if rank > 0 else ""
    print(f"error{where}: {error}", file=sys.stderr, flush=True)
    if world_size == 1:
        sys.exit(EXIT_CODE)
    # The other ranks may be waiting in a collective, and a process group's clean-up could wait for them.
    sys.stdout.flush()
    os._exit(EXIT_CODE)


def _rank_and_world_size():
    for rank, size in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ.get(size, 1))
    if os.environ.get("SLURM_STEP_ID") and "SLURM_PROCID" in os.environ:
        return int(os.environ["SLURM_PROCID"]), int(os.environ.get("SLURM_NTASKS", 1))
    return 0, 1
