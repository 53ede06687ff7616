"""Test geometries with co-prime numbers, so that a wrong width cannot pass by coincidence."""

WIDE_NON_DIVISIBLE = dict(hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=24)
"""80 % 6 != 0; query width 144, kv width 48."""
NARROW = dict(hidden_size=160, num_attention_heads=4, num_kv_heads=2, head_dim=24)
"""Query width 96 < 160; at 4 ranks two share a key/value head."""
MHA = dict(hidden_size=56, num_attention_heads=3, head_dim=16)
"""Query width 48; no even split over 2 ranks."""
MQA = dict(hidden_size=40, num_attention_heads=5, num_kv_heads=1, head_dim=12)
"""One key/value head; query width 60."""
MHA_TP4 = dict(hidden_size=72, num_attention_heads=4, head_dim=20)
"""Splits over 1, 2 and 4 ranks; 72 / 4 = 18."""
GQA_TP4 = dict(hidden_size=88, num_attention_heads=12, num_kv_heads=4, head_dim=10)
"""Splits over 1, 2 and 4 ranks; 88 % 12 != 0."""
QUOTIENT = dict(hidden_size=64, num_attention_heads=4)
"""head_dim absent: plain GPT-NeoX, 16."""

ALL = {
    "wide_non_divisible": WIDE_NON_DIVISIBLE,
    "narrow": NARROW,
    "mha": MHA,
    "mqa": MQA,
    "mha_tp4": MHA_TP4,
    "gqa_tp4": GQA_TP4,
    "quotient": QUOTIENT,
}
TP2 = {name: ALL[name] for name in ("wide_non_divisible", "narrow", "mha_tp4", "gqa_tp4", "quotient")}
TP4 = {name: ALL[name] for name in ("narrow", "mha_tp4", "gqa_tp4", "quotient")}

PER_LAYER = {
    "widening": dict(
        num_layers=3, hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=[[16, 1], [24, 1], [40, 1]]
    ),
    "kv_by_layer": dict(
        num_layers=3, hidden_size=88, num_attention_heads=12, num_kv_heads=[[4, 1], [2, 2]], head_dim=[14, 10, 6]
    ),
    "alternating": dict(num_layers=4, hidden_size=72, num_attention_heads=4, head_dim=[[[20, 12], 2]]),
    "progressive": dict(
        num_layers=3, hidden_size=64, num_attention_heads=8, num_kv_heads=1,
        head_dim=dict(schedule="progressive", base=10, exponent=0.6, multiple_of=2),
    ),
}  # fmt: skip
"""Widths that differ from layer to layer. All split over 2 ranks, and all but the first over 4; in the second and the
last some key/value heads are then shared by ranks."""

MIXED = {
    "gqa": dict(
        num_layers=3, hidden_size=88, num_attention_heads=12, num_kv_heads=4,
        head_dim=[[10, 3], dict(layer=1, groups=[[6, 8, 4], [22, 4, 2]])],
    ),
    "mha": dict(
        num_layers=2, hidden_size=56, num_attention_heads=12,
        head_dim=[[8, 2], dict(layer=[0, 1], groups=[[6, 8], [16, 4]])],
    ),
    "mqa": dict(
        num_layers=2, hidden_size=40, num_attention_heads=12, num_kv_heads=3,
        head_dim=[[12, 1], [10, 1], dict(layer=0, groups=[[8, 4, 1], [14, 4, 4], [20, 4, 2]])],
    ),
}  # fmt: skip
"""Heads of several widths in a layer. All split over 2 and 4 ranks but "mqa": its layer 1 has 3 key/value heads."""
