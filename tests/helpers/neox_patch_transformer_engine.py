"""Small modules with what the patch changes in GPT-NeoX's attention of Transformer Engine, in several spellings."""

import sys
import types
from typing import Any, Dict

import pytest
import torch

from tests.helpers.neox_patch_arguments import load_placed

PLAIN = '''
import torch
import transformer_engine as te
from megatron import mpu
from rotary_tables import Turns

# the class
class TEMultiheadAttention(te.pytorch.MultiheadAttention):
    """Heads by an engine."""

    def __init__(
        self, neox_args, mask, qkv_init, proj_init, layer_number, rpe=None, rotary=False, use_cache=False,
        parallel_output=False
    ):
        self.pace = neox_args.params_dtype
        # which norm
        if neox_args.norm in ["layernorm", "te_layernorm"]:
            self.normalization = "LayerNorm"
            self.eps = 0.00001
        elif neox_args.norm == ["rmsnorm", "te_rmsnorm"]:
            self.normalization = "RMSNorm"
            self.eps = 0.00000001

        groups = neox_args.num_kv_heads

        # the engine
        super(TEMultiheadAttention, self).__init__(
            hidden_size=neox_args.hidden_size,
            num_attention_heads=neox_args.num_attention_heads,
            num_gqa_groups=groups,
            bias=True,
            layernorm_epsilon=self.eps,
            normalization=self.normalization,
            window_size=neox_args.sliding_window_width,
            attention_dropout=0.0,
            layer_number=layer_number + 1,
            params_dtype=self.pace,
            device=torch.device("cpu"),
            fuse_qkv_params=True,
            return_bias=True,
        )

        # turns
        if neox_args.pos_emb == "rotary":
            self.hidden_size_per_attention_head = mpu.divide(
                neox_args.hidden_size, neox_args.num_attention_heads
            )
            part = int(self.hidden_size_per_attention_head * neox_args.rotary_pct)
            self.turns = Turns(part, neox_args.rotary_emb_base, neox_args.seq_length)
            self.rope_emb = self.turns.get_emb()

    def forward(self, hidden, mask, layer_past=None, rope_emb=None, **kwargs):
        output = super(TEMultiheadAttention, self).forward(
            hidden, mask, rotary_pos_emb=self.rope_emb, **kwargs
        )
        return output
'''

OTHERWISE = """
from megatron.mpu import divide
import transformer_engine as te, torch
from rotary_tables import Turns

class Unrelated:
    def forward(self): return super().forward()

class TEMultiheadAttention( te.pytorch.MultiheadAttention ):
    def forward(self, x, m, layer_past=None, **more):
        assert x.dim() == 3  # ours
        return super().forward(x, m,
                               rotary_pos_emb = self.rope_emb, **more)  # done

    def __init__(self, cfg, *, layer_number, use_cache=False, parallel_output=False):
        if cfg.norm in ('layernorm',): self.eps = 1e-5; self.normalization = 'LayerNorm'
        else:
            self.eps, spare = 1e-8, None
            self.eps = 1e-8
            self.normalization = 'RMSNorm'
        super().__init__(cfg.hidden_size, cfg.num_attention_heads, return_bias=True, fuse_qkv_params=True,
            window_size=cfg.sliding_window_width, bias=(True),   # always
            attention_dropout=0.0, layer_number=1+layer_number, params_dtype=cfg.params_dtype,
            num_gqa_groups=cfg.num_kv_heads, device="cpu")
        self.mine = 3
        if 'rotary' == cfg.pos_emb: # turns
            self.hidden_size_per_attention_head = divide(cfg.hidden_size, cfg.num_attention_heads)
            width = self.hidden_size_per_attention_head
            table = Turns(int(width * cfg.rotary_pct), cfg.rotary_emb_base, cfg.seq_length)
            self.rope_emb = table.get_emb() # all positions
"""

SPELLINGS = {"plain": PLAIN, "otherwise": OTHERWISE, "lines end otherwise": PLAIN.replace("\n", "\r\n")}


class Turns:
    """The angles of all positions [s, 1, 1, r] in fp32; `get_emb` gives them rounded, as GPT-NeoX does."""

    def __init__(self, dims, base, length):
        frequencies = base ** (-torch.arange(0, dims, 2).float() / dims)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        self.emb = torch.cat([angles, angles], dim=1)[:, None, None]

    def get_emb(self):
        return self.emb.bfloat16()


def attention_class(monkeypatch: pytest.MonkeyPatch, text: str) -> type:
    """The class of a patched text, beside the file that is placed in the checkout. Transformer Engine is installed."""
    load_placed(monkeypatch, "te_attention")
    tables = types.ModuleType("rotary_tables")
    tables.Turns = Turns
    monkeypatch.setitem(sys.modules, "rotary_tables", tables)
    names: Dict[str, Any] = {"__name__": "patched"}
    exec(compile(text, "patched", "exec"), names)
    return names["TEMultiheadAttention"]


def build(kind: type, args, layer_number: int = 0, **more):
    """An attention of a class of any spelling, with weights of order 0.1."""
    if "mask" in kind.__init__.__code__.co_varnames:
        more.update(mask=None, qkv_init=None, proj_init=None)
    attention = kind(args, layer_number=layer_number, **more)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return attention
