"""How the processes are started: settings of DeepSpeed's launcher."""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class NeoXArgsDeepspeedRunner:
    """Settings that deepy.py hands to DeepSpeed's launcher as command-line options."""

    hostfile: Optional[str] = None
    """Path of a file that lists the hosts of a run, one `name slots=count` per line. Null: the file named by the
    environment variable DLTS_HOSTFILE, else `/job/hostfile` if there is one, else this machine alone. A file that is
    not there means this machine alone too, with a warning."""

    include: Optional[str] = None
    """Hosts and devices to use out of the hostfile, e.g. `worker-0@worker-1:0,2` for all of worker-0 and two devices of
    worker-1. Null: all. Cannot be combined with `exclude`."""

    exclude: Optional[str] = None
    """Hosts and devices to leave out, written like `include`. Null: none."""

    num_nodes: int = -1
    """Use only the first so many hosts of the hostfile. -1: all of them."""

    num_gpus: Optional[int] = None
    """Processes to start on each host, one per device. Null: as many as there are GPUs (or slots in the hostfile); on a
    machine without GPUs, pipeline stages times tensor-parallel size."""

    master_port: int = 29500
    """TCP port on which the processes find each other. Null or unset on one machine: a free one; with a hostfile, the
    default."""

    master_addr: Optional[str] = None
    """Address of the host with rank 0. Null: the launcher finds it out. The environment variable MASTER_ADDR goes
    first."""

    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm"] = "pdsh"
    """The program that starts processes on several hosts. Irrelevant on one host unless `force_multi` is true."""

    force_multi: bool = False
    """Use the multi-host launcher even when there is only one host, as a SLURM or MPI allocation of one node needs.
    Implied by `deepspeed_slurm` and `deepspeed_mpi`."""

    autotuning_run: Optional[str] = None
    """`tune` or `run`: DeepSpeed's search for batch and ZeRO settings. Refused unless null: autotuning is not built."""

    no_ssh_check: bool = False
    """Skip the launcher's test that the first host can be reached by ssh."""

    comment: Optional[str] = None
    """Text passed to `srun --comment`, for clusters that ask for one. Only with the slurm launcher."""

    account: Optional[str] = None
    """Account charged for the job, passed to `srun --account`. Only with the slurm launcher."""
