"""Process identity, seeds and settings of single features."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class NeoXArgsOther:
    """Ranks and seeds, resuming, and settings that belong to no other group."""

    distributed_backend: str = "nccl"
    """Communication library of torch.distributed: nccl for GPUs, gloo for CPUs. On a machine without GPUs gloo is used
    whatever is set here."""

    local_rank: Optional[int] = None
    """This process's number on its host, from the environment at start."""

    rank: Optional[int] = None
    """This process's number in the whole run, from the environment at start."""

    lazy_mpu_init: bool = False
    """Build the model before the process groups. Refused unless false: not built."""

    short_seq_prob: float = 0.1
    """Share of deliberately short samples. Accepted for compatibility; only BERT-style data used it, the GPT data do
    not."""

    eod_mask_loss: bool = False
    """Leave end-of-document tokens in the input out of the loss: what they predict does not count."""

    adlr_autoresume: bool = False
    """Restart through NVIDIA's ADLR cluster tools. Refused unless false: not built."""

    adlr_autoresume_interval: int = 1000
    """Iterations between its checks. Refused unless default: not built."""

    seed: int = 1234
    """Seed of initial weights, data order and dropout."""

    onnx_safe: bool = False
    """Use only operations that ONNX export knows. Refused unless false: not built."""

    deepscale: bool = False
    """Train with DeepScale. Refused unless false: not built."""

    deepscale_config: Optional[str] = None
    """Configuration file of DeepScale. Refused unless null: not built."""

    deepspeed_mpi: bool = False
    """Find ranks and the master address through MPI (needs mpi4py)."""

    deepspeed_slurm: bool = False
    """Take ranks from SLURM's environment variables instead of the launcher's."""

    user_script: Optional[str] = None
    """Script that deepy.py starts. Taken from the command line."""

    iteration: Optional[int] = None
    """Checkpoint to load, by its iteration; a missing one is then an error. Null: the latest. During training it holds
    the iteration reached."""

    do_train: Optional[bool] = None
    """Whether there is training data to use. Set when data sets are built."""

    do_valid: Optional[bool] = None
    """Whether there is validation data to use. Set when data sets are built."""

    do_test: Optional[bool] = None
    """Whether there is test data to use. Set when data sets are built."""

    global_num_gpus: Optional[int] = None
    """Number of processes of the whole run. Null: counted from hostfile, `num_gpus`, GPUs, or pipeline stages x
    tensor-parallel size."""
