"""Valid arguments for small models on a CPU."""

from typing import Any, Dict

from megatron.neox_arguments import NeoXArgs

TINY: Dict[str, Any] = dict(
    num_layers=2,
    seq_length=32,
    max_position_embeddings=32,
    train_micro_batch_size_per_gpu=2,
    pos_emb="rotary",
    no_weight_tying=True,
    precision="fp32",
    padded_vocab_size=128,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_cpu_initialization=True,
    distributed_backend="gloo",
    train_iters=10,
    optimizer={"type": "adam", "params": {"lr": 1e-3}},
)
"""Everything but the widths."""


def tiny_values(**overrides: Any) -> Dict[str, Any]:
    """Argument values of a two-layer model without dropout, in fp32, that needs no tokenizer.

    Without a geometry among the overrides it is hidden 64 with 4 heads.
    """
    widths = {} if "hidden_size" in overrides else dict(hidden_size=64, num_attention_heads=4)
    return {**TINY, **widths, **overrides}


def tiny_args(**overrides: Any) -> NeoXArgs:
    """NeoXArgs of `tiny_values`; the geometries of tests/helpers/geometries.py can be passed straight in."""
    return NeoXArgs.from_dict(tiny_values(**overrides))
