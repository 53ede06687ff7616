"""Which process am I? Read from the variables that the launchers set."""

import os
import re
from functools import partial
from typing import Mapping, NamedTuple, Optional

from megatron.errors import ConfigError


class Process(NamedTuple):
    """A process of the run: its number, its number on this machine, and how many there are."""

    rank: int
    local_rank: int
    world_size: int


def this_process(
    deepspeed_slurm: Optional[bool] = False, launcher: Optional[str] = None, environ: Mapping[str, str] = os.environ
) -> Optional[Process]:
    """The process as its launcher describes it, or None when no launcher started it.

    SLURM's own variables are used only when the config says that SLURM starts the processes: they are also set in an
    interactive session, where nothing has been launched.

    Raises ConfigError if a variable does not hold a number.
    """
    number = partial(_number, environ)
    by_slurm = deepspeed_slurm is True or (str(launcher).lower() == "slurm" and not environ.get("RANK"))
    if by_slurm and environ.get("SLURM_PROCID"):
        tasks = number("SLURM_NTASKS") or number("SLURM_NNODES", 1) * number("SLURM_NTASKS_PER_NODE", 1)
        return Process(number("SLURM_PROCID"), number("SLURM_LOCALID"), tasks)
    if environ.get("WORLD_SIZE"):
        rank = number("RANK")
        return Process(rank, number("LOCAL_RANK", rank), number("WORLD_SIZE"))
    if environ.get("OMPI_COMM_WORLD_SIZE"):
        ranks = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_LOCAL_RANK")
        return Process(*ranks, number("OMPI_COMM_WORLD_SIZE"))
    return None


def publish(process: Process, master_addr: Optional[str], master_port: int) -> None:
    """Set the variables torch.distributed reads, without replacing a rendezvous address that is already there."""
    os.environ["RANK"] = str(process.rank)
    os.environ["LOCAL_RANK"] = str(process.local_rank)
    os.environ["WORLD_SIZE"] = str(process.world_size)
    address = master_addr or first_slurm_host(os.environ.get("SLURM_JOB_NODELIST", ""))
    if address:
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", str(master_port))


def discover_mpi(master_port: int) -> None:
    """Agree over MPI on the rendezvous address, which mpirun does not pass on, unless it is in the environment.

    Raises ConfigError where mpi4py is not installed.
    """
    if os.environ.get("MASTER_ADDR"):
        return
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        raise ConfigError(
            "deepspeed_mpi=True needs the address of rank 0: set master_addr, or install mpi4py to find it"
        ) from None
    from deepspeed.comm import mpi_discovery

    mpi_discovery(distributed_port=master_port)


def first_slurm_host(node_list: str) -> str:
    """First host of SLURM's compressed list: "gpu[07-09,12]" and "gpu07,gpu08" both give gpu07."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?", node_list)
    return (match[1] + (match[2] or "")) if match else ""


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"${name}={text}, which the launcher should have set to a whole number; correct or unset it")
    return int(text)
