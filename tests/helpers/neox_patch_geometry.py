"""Small modules with the constructs of GPT-NeoX's logging, checkpointing and layer list that the patch changes."""

from types import SimpleNamespace

LOGGING = """
import math
from megatron import mpu
from megatron.utils import report_memory
import sys

def get_actual_flops(neox_args, iter_time_s) -> float:
    ranks = 2
    h, s, n = neox_args.hidden_size, neox_args.seq_length, neox_args.num_layers
    tokens = neox_args.train_batch_size * s
    factor = 4 if neox_args.checkpoint_activations else 3
    if "rwkv" in neox_args.attention_config:
        flops_per_iteration = tokens * h
    elif "mamba" in neox_args.attention_config:
        inner = 2 * h
        flops_per_iteration = tokens * inner
    else:
        flops_per_iteration = (
            24 * factor * tokens * n * h**2 * (1 + s / (6.0 * h) + neox_args.padded_vocab_size / (16.0 * n * h))
        )
    return flops_per_iteration / (iter_time_s * ranks)


def get_forward_backward_flops(neox_args, iter_time_s) -> float:
    ranks = 2
    h, s, n = neox_args.hidden_size, neox_args.seq_length, neox_args.num_layers
    tokens = neox_args.train_batch_size * s
    if "rwkv" in neox_args.attention_config:
        flops_per_iteration = tokens * h
    elif "mamba" in neox_args.attention_config:
        inner = 2 * h
        flops_per_iteration = tokens * inner
    else:
        flops_per_iteration = (
            24 * 3 * tokens * n * h**2 * (1 + s / (6.0 * h) + neox_args.padded_vocab_size / (16.0 * n * h))
        )
    return flops_per_iteration / (iter_time_s * ranks)
"""

LOGGING_OTHERWISE = """
import sys, math

def human(number): return f"{number:.1f}"

def get_flops(cfg, seconds):
  '''one name, as it was; cfg.attention_config decides'''
  kinds_are_printed = False
  if cfg.log_kinds:
    kinds_are_printed = True # not ours
  h, s, n = cfg.hidden_size, cfg.seq_length, cfg.num_layers
  # which kind?
  if 'mamba' in cfg.attention_config:
    note, work = 'states', 0
    note = 'long'; work = cfg.train_batch_size * s * 2 * h
  elif "rwkv" in cfg.attention_config: note = 'none'; work = cfg.train_batch_size * s * h
  # all others
  else: # as ever
    factor = 4 if cfg.checkpoint_activations else 3; note = 'all'
    work = 24*factor*cfg.train_batch_size*s*n*h**2*(1 + s/(6.0*h) + cfg.padded_vocab_size/(16.0*n*h))
  seconds = seconds * 2
  return work / seconds
"""

LOGGING_SHORT = LOGGING_OTHERWISE.replace("else: # as ever\n    factor =", "else:  factor =").replace(
    "'all'\n    work =", "'all'; work ="
)
LOGGINGS = {"as GPT-NeoX": LOGGING, "otherwise": LOGGING_OTHERWISE, "short": LOGGING_SHORT}

CHECKPOINTING = """
import os
from megatron import mpu
from megatron import print_rank_0
from pathlib import Path

def save_ds_checkpoint(iteration, model, neox_args):
    state = {"iteration": iteration}
    tag = f"global_step{iteration}"

    # weights
    model.save_checkpoint(neox_args.save, tag=tag, client_state=state)

    # settings
    os.makedirs(os.path.join(neox_args.save, tag, "configs"), exist_ok=True)

def load_checkpoint(neox_args, model, optimizer, lr_scheduler, inference=False, iteration=None):
    if neox_args.deepspeed:
        tag = None if iteration is None else f"global_step{iteration}"
        name, state = model.load_checkpoint(
            neox_args.load,
            load_optimizer_states=not neox_args.no_load_optim,
            tag=tag,
        )
    else:
        raise ValueError
    return name
"""

CHECKPOINTING_OTHERWISE = """
import os

def save_ds_checkpoint(step, engine, cfg):
  '''also: model.save_checkpoint(...)'''
  where, name = cfg.save, f'global_step{step}'
  if engine.ready:
    engine.save_checkpoint(client_state={"iteration": step}, tag=name, save_dir=cfg.save) # all ranks
    engine.flushed = True
  else: raise RuntimeError

def load_checkpoint(cfg, engine, optimizer, lr_scheduler, inference=False, iteration=None):
  tag = f'global_step{iteration}' if iteration is not None else None
  try:
    # from the disk
    out = engine.load_checkpoint(cfg.load, tag, load_optimizer_states=False)
  finally:
    engine.tried = True
  return out[0]
"""
CHECKPOINTINGS = {"as GPT-NeoX": CHECKPOINTING, "otherwise": CHECKPOINTING_OTHERWISE}

LAYER_LIST = """
import math
from megatron import mpu
from megatron.mpu import ParallelRelativePositionBias
from deepspeed.pipe import LayerSpec

class GPT2ModelPipe:
    def init_specs(self):
        self.specs = []
        if self.neox_args.pos_emb == "rpe":
            width = mpu.divide(
                self.neox_args.hidden_size, self.neox_args.num_attention_heads
            )
            self.specs.append(ParallelRelativePositionBias(scale=math.sqrt(width)))
"""
LAYER_LIST_OTHERWISE = """
import math
import megatron.mpu as groups

class GPT2ModelPipe(object):
    def init_specs(this):
        args = this.neox_args; this.specs = []
        if args.pos_emb == 'rpe':  # T5
            from megatron.mpu import ParallelRelativePositionBias as Bias
            this.specs.append(Bias(scale=math.sqrt(args.hidden_size // args.num_attention_heads)))
"""
LAYER_LIST_KEYWORDS = LAYER_LIST.replace(
    "self.neox_args.hidden_size, self", "denominator=self.neox_args.num_attention_heads, numerator=self"
).replace("numerator=self.neox_args.num_attention_heads", "numerator=self.neox_args.hidden_size")
LAYER_LISTS = {"as GPT-NeoX": LAYER_LIST, "otherwise": LAYER_LIST_OTHERWISE, "keywords": LAYER_LIST_KEYWORDS}


COUNTED = dict(
    num_layers=3,
    seq_length=32,
    train_batch_size=6,
    padded_vocab_size=128,
    num_kv_heads=None,
    head_dim=None,
    softmax_scale=None,
    rotary_pct=1.0,
    pos_emb="rotary",
    use_mup=False,
    log_kinds=False,
    expansion_factor=None,
    intermediate_size=None,
)


def counted_arguments(attention_config=("global",) * 3, checkpoint_activations=False, **widths):
    """What counting operations asks of NeoXArgs."""
    given = dict(COUNTED, attention_config=list(attention_config), checkpoint_activations=checkpoint_activations)
    return SimpleNamespace(**{**given, **widths})


def counting_functions(text, placed):
    """The functions of a text, that which counts recomputed activations first; of imports only torch's are made."""
    lines = [line for line in text.split("\n") if not line.startswith("from megatron")]
    space = {"head_dim_flops": placed.head_dim_flops, "other_query_width": placed.other_query_width}
    exec("\n".join(lines), space)
    return [space[name] for name in ("get_actual_flops", "get_flops", "get_forward_backward_flops") if name in space]
