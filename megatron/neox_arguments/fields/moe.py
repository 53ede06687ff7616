"""Mixture of experts: not built."""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class NeoXArgsMoE:
    """Mixture-of-experts settings, known so that they can be refused by name."""

    moe_num_experts: int = 1
    """Experts per mixture-of-experts layer; 1 is an ordinary MLP. Refused unless default: not built."""

    moe_expert_interval: int = 1
    """Every so many layers one has experts. Refused unless default: not built."""

    moe_top_k: int = 1
    """Experts that each token is sent to. Refused unless default: not built."""

    moe_router_type: Literal["sinkhorn", "topk"] = "sinkhorn"
    """How tokens are assigned to experts. Refused unless default: not built."""

    moe_lbl_in_fp32: bool = False
    """Compute the load-balancing loss in fp32. Refused unless default: not built."""

    moe_jitter_eps: Optional[float] = None
    """Noise on the router's input. Refused unless null: not built."""
