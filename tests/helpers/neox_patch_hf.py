"""Layers in memory, by the names of GPT-NeoX and of transformers, for tests of the patch's converters."""

from types import SimpleNamespace

import torch

FFN = 22


def qkv(geometry, columns=None, seed=0):
    """q, k and v of random numbers, [rows, hidden] or biases."""
    generator = torch.Generator().manual_seed(seed)
    rows = (geometry.query_hidden_size, geometry.kv_hidden_size, geometry.kv_hidden_size)
    more = () if columns == 0 else (geometry.hidden_size,)
    return [torch.randn((count, *more), generator=generator) for count in rows]


def fused_by_hand(parts, geometry, tp):
    """GPT-NeoX's fused parameter of each rank, one head at a time."""
    q, k, v = (part.split(geometry.head_dim) for part in parts)
    n, m = geometry.num_attention_heads // tp, geometry.num_kv_heads // tp
    ranks = []
    for rank in range(tp):
        queries, keys, values = q[rank * n : (rank + 1) * n], k[rank * m : (rank + 1) * m], v[rank * m : (rank + 1) * m]
        if geometry.num_attention_heads == geometry.num_kv_heads:
            heads = [part for head in zip(queries, keys, values, strict=True) for part in head]
        else:
            heads = [*queries, *keys, *values]
        ranks.append(torch.cat(heads))
    return ranks


class Stand:
    """A config object of transformers, of which only the attributes matter here."""

    def __init__(self, model_type, **settings):
        self.model_type = model_type
        vars(self).update(settings)


def layer_files(geometry, tp, norms, biases):
    """Shards of a layer in memory, and what they are by the small modules' names."""
    parts = qkv(geometry)
    theirs = dict(zip(("q", "k", "v"), parts, strict=True))
    ranks = [{"attention.query_key_value.weight": shard} for shard in fused_by_hand(parts, geometry, tp)]
    whole = {"norm.scale": ("norm.weight", torch.rand(4))}
    if norms:
        for part in "qk":
            whole[f"attention.{part}_layernorm.scale"] = f"self_attn.{part}_norm.weight", torch.rand(geometry.head_dim)
    if biases:
        rows = qkv(geometry, 0, seed=1)
        for rank, shard in zip(ranks, fused_by_hand(rows, geometry, tp), strict=True):
            rank["attention.query_key_value.bias"] = shard
        theirs.update({f"self_attn.{part}_proj.bias": row for part, row in zip("qkv", rows, strict=True)})
        whole["attention.dense.bias"] = "self_attn.o_proj.bias", torch.rand(4)
    for rank in ranks:
        rank.update({name: tensor for name, (_, tensor) in whole.items()})
        rank["attention.dense.weight"], rank["mlp.linear2.weight"] = torch.zeros(1), torch.zeros(4, FFN // tp)
        rank["attention.rotary_emb.inv_freq"] = torch.zeros(1)
    return ranks, {**theirs, **dict(whole.values())}


class Model:
    """What the import script asks of a model."""

    def __init__(self, config, weights):
        self.config, self.model = config, SimpleNamespace(config=config)
        self._weights = weights

    def state_dict(self):
        return dict(self._weights)


def hf_model(geometry, norms=False, biases=False, **more):
    """One layer by the names of transformers."""
    config = SimpleNamespace(
        **{
            **dict(model_type="qwen3" if norms else "llama", hidden_act="silu", tie_word_embeddings=False),
            **dict(hidden_size=geometry.hidden_size, num_attention_heads=geometry.num_attention_heads),
            **dict(num_key_value_heads=geometry.num_kv_heads, head_dim=geometry.head_dim, num_hidden_layers=1),
            **dict(intermediate_size=FFN, vocab_size=10, max_position_embeddings=32, rms_norm_eps=1e-6),
            **dict(rope_theta=5000.0),
            **more,
        }
    )
    if config.head_dim is None:
        del config.head_dim
    prefix, hidden = "model.layers.0.self_attn.", geometry.hidden_size
    weights = {f"{prefix}{part}_proj.weight": rows for part, rows in zip("qkv", qkv(geometry), strict=True)}
    weights[f"{prefix}o_proj.weight"] = torch.randn(hidden, geometry.query_hidden_size)
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = torch.randn(10, hidden)
    if norms:
        weights.update({f"{prefix}{part}_norm.weight": torch.rand(geometry.head_dim) for part in "qk"})
    if biases:
        weights.update({f"{prefix}{part}_proj.bias": row for part, row in zip("qkv", qkv(geometry, 0), strict=True)})
    return Model(config, weights)
