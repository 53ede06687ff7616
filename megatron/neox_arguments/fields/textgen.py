"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class NeoXArgsTextgen:
    """TODO: what these arguments are for."""

    text_gen_type: Optional[str] = None
    """TODO."""

    precompute_model_name: Optional[str] = None
    """TODO."""

    temperature: float = 0.0
    """TODO."""

    top_p: float = 0.0
    """TODO."""

    top_k: int = 0
    """TODO."""

    return_logits: bool = False
    """TODO."""

    maximum_tokens: int = 64
    """TODO."""

    prompt_end: str = "\n"
    """TODO."""

    sample_input_file: Optional[str] = None
    """TODO."""

    sample_output_file: str = "samples.txt"
    """TODO."""

    num_samples: int = 1
    """TODO."""

    recompute: bool = False
    """TODO."""

    eval_results_prefix: str = ""
    """TODO."""

    eval_tasks: Optional[list] = None
    """TODO."""
