"""Small modules with what the patch changes in GPT-NeoX's own attention, in several spellings."""

PLAIN = '''
"""Attention.

    Letters:
     hp: h/p
     hn: h/n
     b: batches
"""
import math
import torch
from megatron import mpu
from megatron.model.norms import get_norm
from small_parts import Linear, flash, flash_of_rows, turned

ENGINE = "small"


class ParallelSelfAttention(torch.nn.Module):
    """Heads, some of them on each rank."""

    def __init__(self, neox_args, init_method=None, layer_number=0, use_cache=False):
        super().__init__()
        # sizes
        ranks = mpu.get_model_parallel_world_size()
        self.hidden_size_per_partition = mpu.divide(neox_args.hidden_size, ranks)
        self.hidden_size_per_attention_head = mpu.divide(
            neox_args.hidden_size, neox_args.num_attention_heads
        )
        self.num_attention_heads_per_partition = mpu.divide(neox_args.num_attention_heads, ranks)

        self.use_qk_layernorm = neox_args.use_qk_layernorm
        if self.use_qk_layernorm:
            kind, eps = get_norm(neox_args)
            self.qk_layernorm = kind(
                [self.num_attention_heads_per_partition, self.hidden_size_per_attention_head], eps=eps
            )

        self.gqa = neox_args.num_kv_heads not in (None, neox_args.num_attention_heads)
        if self.gqa:
            self.num_kv_heads_per_partition = mpu.divide(neox_args.num_kv_heads, ranks)
            self.kv_hidden_size = neox_args.num_kv_heads * self.hidden_size_per_attention_head  # of all ranks
        else:
            self.num_kv_heads_per_partition = self.num_attention_heads_per_partition
            self.kv_hidden_size = neox_args.hidden_size

        if self.gqa:
            self.query_key_value = Linear(
                neox_args=neox_args,
                input_size=neox_args.hidden_size,
                output_size=neox_args.hidden_size + 2 * self.kv_hidden_size,
                bias=neox_args.use_bias_in_attn_linear,
            )
        else:
            # one head behind the other
            self.query_key_value = Linear(
                neox_args=neox_args,
                input_size=neox_args.hidden_size,
                output_size=3 * neox_args.hidden_size,
                bias=neox_args.use_bias_in_attn_linear,
            )

        factor = None
        self.norm_factor = math.sqrt(self.hidden_size_per_attention_head)
        if neox_args.apply_query_key_layer_scaling:
            factor = max(1, layer_number)
            self.norm_factor *= factor
        if neox_args.use_mup:
            self.norm_factor = self.hidden_size_per_attention_head
        self.factor = factor

        self.turned_dims = 0
        if neox_args.pos_emb == "rotary":
            self.turned_dims = int(self.hidden_size_per_attention_head * neox_args.rotary_pct)
        self.base = neox_args.rotary_emb_base

        self.use_flash_attention = neox_args.attention_config[layer_number] == "flash"
        self.flash_qkv_fn = flash
        self.flash_varlen_qkv_fn = flash_of_rows
        self.use_cache = use_cache

        # back
        self.dense = Linear(
            neox_args=neox_args,
            input_size=neox_args.hidden_size,
            output_size=neox_args.hidden_size,
            bias=neox_args.use_bias_in_attn_linear,
            skip_bias_add=True,
        )

    def attention(self, query_layer, key_layer, value_layer):
        scores = torch.einsum("sbnd,tbnd->bnst", query_layer, key_layer) * (1.0 / self.norm_factor)
        if self.factor is not None:
            scores = scores * self.factor
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        return torch.einsum("bnst,tbnd->bnsd", scores.masked_fill(hidden, -1e30).softmax(-1), value_layer)

    def flash_attention(self, query_layer, key_layer, value_layer):
        sizes = key_layer.size(1), key_layer.size(0)
        # to batches first
        key_layer = key_layer.transpose(0, 1).reshape(*sizes, self.num_kv_heads_per_partition, -1)
        value_layer = value_layer.transpose(0, 1).reshape(*sizes, self.num_kv_heads_per_partition, -1)
        query_layer = query_layer.transpose(0, 1)
        if self.training:
            output = self.flash_qkv_fn(query_layer, key_layer, value_layer, 0.0, softmax_scale=None, causal=True)
        else:
            output = self.flash_varlen_qkv_fn(
                query_layer,
                key_layer,
                value_layer,
                softmax_scale=None,  # its own
                causal=True,
            )
        return output.transpose(1, 2)

    def gqa_project(self, hidden_states):
        mixed, _ = self.query_key_value(hidden_states)
        kv = self.num_kv_heads_per_partition * self.hidden_size_per_attention_head
        parts = mixed.split([mixed.size(-1) - 2 * kv, kv, kv], dim=-1)
        heads = self.num_attention_heads_per_partition, self.num_kv_heads_per_partition
        shapes = [(count, self.hidden_size_per_attention_head) for count in (*heads, heads[1])]
        query_layer, key_layer, value_layer = (part.unflatten(-1, shape) for part, shape in zip(parts, shapes))

        # each key for its queries
        if not self.use_flash_attention:
            times = heads[0] // heads[1]
            key_layer = torch.repeat_interleave(key_layer, times, dim=2)
            value_layer = torch.repeat_interleave(value_layer, times, dim=2)
        return query_layer, key_layer, value_layer

    def forward(self, hidden_states, layer_past=None):
        if self.gqa:
            query_layer, key_layer, value_layer = self.gqa_project(hidden_states)
        else:
            mixed, _ = self.query_key_value(hidden_states)
            mixed = mixed.view(
                *mixed.shape[:2], self.num_attention_heads_per_partition, 3 * self.hidden_size_per_attention_head
            )
            query_layer, key_layer, value_layer = mixed.chunk(3, dim=-1)
        # norms
        if self.use_qk_layernorm:
            query_layer = self.qk_layernorm(query_layer)
            key_layer = self.qk_layernorm(key_layer)

        before = 0 if layer_past is None else layer_past.size(1)
        query_layer = turned(query_layer, self.turned_dims, self.base, before)
        key_layer = turned(key_layer, self.turned_dims, self.base, before)
        if layer_past is not None:
            key_layer = torch.cat([layer_past[0], key_layer])
            value_layer = torch.cat([layer_past[1], value_layer])

        if self.use_flash_attention:
            context = self.flash_attention(query_layer, key_layer, value_layer)
        else:
            context = self.attention(query_layer, key_layer, value_layer)
        # heads of this rank, side by side
        context = context.permute(2, 0, 1, 3).contiguous()
        context = context.view(*context.shape[:2], self.hidden_size_per_partition)
        output, bias = self.dense(context)
        if self.use_cache:
            output = [output, torch.stack((key_layer, value_layer))]
        return output, bias
'''

OTHERWISE = """
from megatron import mpu
import torch, math
from megatron.model.norms import get_norm as norm_of
from small_parts import Linear, flash, flash_of_rows, turned

class ParallelMLP:
  def attention(self, q, k): return q

def quotient(h, by): return h // by

class ParallelSelfAttention( torch.nn.Module ):
  def forward( me, x, layer_past = None ):
    if not me.gqa:
      y, _ = me.query_key_value(x)
      q,k,v = y.unflatten(-1, (me.num_attention_heads_per_partition, -1)).chunk(3, -1)
    else: q, k, v = me.gqa_project(x)
    if me.use_qk_layernorm: # normed
      k = me.qk_layernorm(k); q = me.qk_layernorm(q)
    start = 0 if layer_past is None else layer_past.size(1)
    q, k = (turned(t, me.turned_dims, me.base, start) for t in (q, k))
    if layer_past is not None:
      k, v = torch.cat([layer_past[0], k]), torch.cat([layer_past[1], v])
    c = (me.flash_attention(q, k, v) if me.use_flash_attention else me.attention(q=q, k=k, v=v)).permute(2, 0, 1, 3)
    out, bias = me.dense(c.reshape(*c.shape[:2], me.hidden_size_per_partition)) # all heads
    return ([out, torch.stack((k, v))] if me.use_cache else out), bias

  def gqa_project( me, x ):
    y, _ = me.query_key_value(x)
    n, m, d = me.num_attention_heads_per_partition, me.num_kv_heads_per_partition, me.hidden_size_per_attention_head
    q, k, v = (p.unflatten(-1, (-1, d)).contiguous() for p in y.split([n*d, m*d, m*d], -1))
    if (not me.use_flash_attention):
      k, v = (p.repeat_interleave(n//m, dim=2) for p in (k, v))   # as many
    return q, k, v

  def flash_attention(me, q, k, v):
    b, t = k.size(1), k.size(0)
    if me.training: return me.flash_qkv_fn(
      q.transpose(0,1), k.transpose(0,1), v.transpose(0,1), 0.,
      causal = True,  # always
    ).transpose(1,2)
    return me.flash_varlen_qkv_fn(q.transpose(0,1), k.transpose(0,1).reshape(b, t, me.num_kv_heads_per_partition, -1),
        v.transpose(0,1), causal=True, **{}).transpose(1, 2)

  def attention( me, q, k, v ):
    w = torch.einsum('sbnd,tbnd->bnst', q, k) / me.norm_factor * (me.factor or 1)
    w = w + torch.full(w.shape[-2:], -1e30).triu(1 + w.size(-1) - w.size(-2))
    return torch.einsum('bnst,tbnd->bnsd', w.softmax(-1), v)

  def __init__( me, cfg, *, use_cache=False, layer_number=0, extra=True ):
    super().__init__()
    width, mine = cfg.hidden_size, 5
    h = cfg.hidden_size
    n, p = cfg.num_attention_heads, mpu.get_model_parallel_world_size()
    me.num_attention_heads_per_partition = n // p
    me.hidden_size_per_attention_head = h // cfg.num_attention_heads
    me.hidden_size_per_partition = quotient(h=h, by=p) # of a rank
    me.use_flash_attention = 'flash' == cfg.attention_config[layer_number]
    me.gqa = bool(cfg.num_kv_heads) and cfg.num_kv_heads != n
    me.use_qk_layernorm = cfg.use_qk_layernorm # joint
    if me.use_qk_layernorm:
      make, eps = norm_of(cfg)
      shape = [me.num_attention_heads_per_partition, me.hidden_size_per_attention_head]
      me.qk_layernorm = make(shape, eps=eps)
    if not me.gqa:
      me.kv_hidden_size, spare = h, None
      me.kv_hidden_size = h
      me.num_kv_heads_per_partition = n // p
      rows = 3*h
    else:
      me.kv_hidden_size = cfg.num_kv_heads * me.hidden_size_per_attention_head
      me.num_kv_heads_per_partition = cfg.num_kv_heads // p
      rows = h + me.kv_hidden_size * 2
    me.query_key_value = Linear(cfg, width, rows, bias=cfg.use_bias_in_attn_linear) # fused
    me.factor = max(1, layer_number) if cfg.apply_query_key_layer_scaling else None
    me.norm_factor = me.hidden_size_per_attention_head ** 0.5
    # further
    if me.factor: me.norm_factor = me.norm_factor * me.factor
    if cfg.use_mup: me.norm_factor = me.hidden_size_per_attention_head
    me.turned_dims = int(me.hidden_size_per_attention_head * cfg.rotary_pct) if 'rotary' == cfg.pos_emb else 0
    me.base, me.use_cache = cfg.rotary_emb_base, use_cache
    me.flash_qkv_fn, me.flash_varlen_qkv_fn = flash, flash_of_rows
    me.dense = Linear(cfg, h, output_size=h, skip_bias_add=True, bias=cfg.use_bias_in_attn_linear)
"""

SPELLINGS = {"plain": PLAIN, "otherwise": OTHERWISE, "lines end otherwise": PLAIN.replace("\n", "\r\n")}
