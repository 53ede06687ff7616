"""Which process am I? Read from the variables that the launchers set."""

import os
import re
from typing import Mapping, NamedTuple, Optional


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
    """
    by_slurm = deepspeed_slurm is True or (str(launcher).lower() == "slurm" and "RANK" not in environ)
    if by_slurm and "SLURM_PROCID" in environ:
        return Process(int(environ["SLURM_PROCID"]), int(environ.get("SLURM_LOCALID", 0)), _slurm_tasks(environ))
    if "WORLD_SIZE" in environ:
        rank = int(environ.get("RANK", 0))
        return Process(rank, int(environ.get("LOCAL_RANK", rank)), int(environ["WORLD_SIZE"]))
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return Process(
            int(environ["OMPI_COMM_WORLD_RANK"]),
            int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)),
            int(environ["OMPI_COMM_WORLD_SIZE"]),
        )
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


def first_slurm_host(node_list: str) -> str:
    """First host of SLURM's compressed list: "gpu[07-09,12]" and "gpu07,gpu08" both give gpu07."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?", node_list)
    return (match[1] + (match[2] or "")) if match else ""


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    if "SLURM_NTASKS" in environ:
        return int(environ["SLURM_NTASKS"])
    return int(environ["SLURM_NNODES"]) * int(environ["SLURM_NTASKS_PER_NODE"])
