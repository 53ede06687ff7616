"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class NeoXArgsDeepspeedRunner:
    """TODO: what these arguments are for."""

    hostfile: Optional[str] = None
    """TODO."""

    include: Optional[str] = None
    """TODO."""

    exclude: Optional[str] = None
    """TODO."""

    num_nodes: int = -1
    """TODO."""

    num_gpus: Optional[int] = None
    """TODO."""

    master_port: int = 29500
    """TODO."""

    master_addr: Optional[str] = None
    """TODO."""

    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm"] = "pdsh"
    """TODO."""

    force_multi: bool = False
    """TODO."""

    autotuning_run: Optional[str] = None
    """TODO."""

    no_ssh_check: bool = False
    """TODO."""

    comment: Optional[str] = None
    """TODO."""

    account: Optional[str] = None
    """TODO."""
