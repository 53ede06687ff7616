"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class NeoXArgsMoE:
    """TODO: what these arguments are for."""

    moe_num_experts: int = 1
    """TODO."""

    moe_expert_interval: int = 1
    """TODO."""

    moe_top_k: int = 1
    """TODO."""

    moe_router_type: Literal["sinkhorn", "topk"] = "sinkhorn"
    """TODO."""

    moe_lbl_in_fp32: bool = False
    """TODO."""

    moe_jitter_eps: Optional[float] = None
    """TODO."""
