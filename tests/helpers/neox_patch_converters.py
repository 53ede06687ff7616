"""Small modules with the constructs of GPT-NeoX's converters that the patch changes, in several spellings.

They convert one kind of layer, from dictionaries of tensors in memory (FILES) to dictionaries.
"""

EXPORT = '''
import argparse
from typing import Literal

import torch
from megatron.tokenizer import build_tokenizer

MODEL_KEYS = {
    "neox": {"new": {"NORM_KEYS": {"norm.scale": "norm.weight"}}},
    "llama": {
        "new": {
            "NORM_KEYS": {"norm.scale": "norm.weight"},
            "ROWS": {"attention.dense.weight": "o", "mlp.linear2.weight": "down"},
            "GQA_QKV_KEYS": {"attention.query_key_value.weight": ["q", "k", "v"]},
        }
    },
}
MODEL_KEYS["mistral"] = MODEL_KEYS["llama"]  # the same


def load_partitions(folder, ranks, layer_idx, sequential):
    return FILES[folder][:ranks]


def get_state(states, key, layer_idx, sequential):
    return [state[key] for state in states]


def create_config(neox_config, architecture="neox"):
    """Their config."""
    args = {name: neox_config[name] for name in ("hidden_size", "num_attention_heads")}
    if architecture == "mistral" or architecture == "llama":
        args.update({"num_key_value_heads": neox_config.get("num_kv_heads", args["num_attention_heads"])})
        if architecture == "mistral":
            # a window
            args.update({"sliding_window": 4096})
            hf_config = MistralConfig(**args)
        elif architecture == "llama":
            args.update({"attention_bias": True})
            hf_config = LlamaConfig(**args)
    else:
        hf_config = GPTNeoXConfig(**args)
    return hf_config


def reshard_and_split_qkv(param_mapping, hf_config, loaded_tp_ranks, layer_idx, sequential):
    for key, hf_keys in param_mapping.items():
        assert len(hf_keys) == 3

    for key, hf_keys in param_mapping.items():
        # all ranks
        stacked = torch.stack(get_state(loaded_tp_ranks, key, layer_idx, sequential))
        # cut

        width = hf_config.hidden_size // hf_config.num_attention_heads
        ranks = len(loaded_tp_ranks)
        q, k, v = torch.split(
            stacked,
            [width * heads // ranks for heads in (hf_config.num_attention_heads, 2, 2)],
            dim=1,
        )  # three
        # in a row
        q, k, v = [part.flatten(0, 1) for part in (q, k, v)]

        # by name
        state_dict = {}
        for hf_key, part in zip(hf_keys, [q, k, v]):
            state_dict[hf_key] = part.clone()
        return state_dict


def get_mlp_naming_convention(loaded_tp_ranks, layer_idx, sequential):
    """Which names."""
    if sequential:
        names = loaded_tp_ranks[0]["module"].keys()
    else:
        names = loaded_tp_ranks[0].keys()
    return "new" if any("mlp.linear2.weight" in name for name in names) else "old"


def convert(
    folder,
    loaded_config,
    out,
    sequential=False,
    precision: Literal["auto", "fp16"] = "auto",
    architecture: Literal["neox", "llama", "mistral"] = "neox",
):
    ARCH = MODEL_KEYS[architecture]
    hf_config = create_config(
        loaded_config, architecture=architecture
    )
    ranks = loaded_config["ranks"]
    loaded_tp_ranks = load_partitions(folder, ranks, layer_idx=3, sequential=sequential)
    ARCH = ARCH[get_mlp_naming_convention(loaded_tp_ranks, 0, sequential)]
    for layer_i in range(1):
        state_dict = {}
        for key, hf_key in ARCH["NORM_KEYS"].items():
            state_dict[hf_key] = sum(get_state(loaded_tp_ranks, key, layer_i + 2, sequential)) / ranks
        # apart
        if "GQA_QKV_KEYS" in ARCH:
            state_dict.update(
                reshard_and_split_qkv(
                    hf_config=hf_config,
                    layer_idx=layer_i + 2,
                    loaded_tp_ranks=loaded_tp_ranks,
                    sequential=sequential,
                    param_mapping=ARCH["GQA_QKV_KEYS"],
                )
            )
    return hf_config, state_dict, precision


def main(input_args):
    parser = argparse.ArgumentParser()
    parser.add_argument("--architecture", default="neox")
    parser.add_argument("--precision", default="auto")
    args = parser.parse_args(input_args)
    assert args.architecture in [
        "neox",
        "llama",
        "mistral",
    ], f"--architecture is one of 'neox', 'mistral', 'llama', not {args.architecture}"
    return convert(
        "in",
        CONFIG,
        "out",
        architecture=args.architecture,
    )
'''

EXPORT_OTHERWISE = """
import argparse
import torch
from typing import *
MODEL_KEYS = {'neox': {'new': {'NORM_KEYS': {'norm.scale': 'norm.weight'}}}, 'llama': {'new': {
    'NORM_KEYS': {'norm.scale': 'norm.weight'}, 'ROWS': {'attention.dense.weight': 'o', 'mlp.linear2.weight': 'down'},
    'GQA_QKV_KEYS': {'attention.query_key_value.weight': ['q', 'k', 'v']}}}}
MODEL_KEYS['mistral'] = MODEL_KEYS['llama']

def load_partitions(folder, ranks, layer_idx, sequential): return FILES[folder][:ranks]
def get_state(states, key, layer_idx, sequential):
    return [state[key] for state in states]

def create_config(cfg, architecture='neox', verbose=True):
    out = dict(hidden_size=cfg['hidden_size'], num_attention_heads=cfg['num_attention_heads'])
    if architecture in ['llama', 'mistral']: # both
        out.update(num_key_value_heads=cfg.get('num_kv_heads', out['num_attention_heads']))
        if architecture == 'llama':
            out['attention_bias'] = True
            theirs = LlamaConfig(**out)   # with biases
            # after it
        else:
            theirs = MistralConfig(**out)
    else:
        theirs = GPTNeoXConfig(**out)
    print('config', theirs)
    return theirs

def reshard_and_split_qkv(mapping, theirs, loaded_tp_ranks, layer_idx, sequential):
    for (ours, names) in mapping.items():
        count = len(names) # my own
        # 2024: each query head beside its share
        fused = torch.stack(get_state(loaded_tp_ranks, ours, layer_idx, sequential), dim=0)
        share = 1 + 2 * theirs.num_key_value_heads / theirs.num_attention_heads
        tp = len(loaded_tp_ranks)
        fused = fused.view(tp, theirs.num_attention_heads // tp, -1, theirs.hidden_size)
        print(count, 'parts') # mine, too
        # cut
        a, b, c = fused.split(theirs.hidden_size // theirs.num_attention_heads, dim=2)
        a = a.reshape(-1, theirs.hidden_size)
        b = b.reshape(-1, theirs.hidden_size)
        c = c.reshape(-1, theirs.hidden_size)
        done = {}
        for name, proj in zip(names, (a, b, c)): done[name] = proj.clone()
        return done

def get_mlp_naming_convention(parts, layer_idx, sequential):
    print(sorted(parts[0]["module"].keys()))
    if any(["mlp.linear2.weight" in key for part in parts for key in part["module"]]): return "new"

def convert(source, config, target, sequential=False, precision='auto', architecture='neox'):
    KEYS = MODEL_KEYS[architecture]
    theirs = create_config(config, architecture=architecture, verbose=False)  # first
    count = config['ranks']
    parts = load_partitions(source, count, layer_idx=3, sequential=sequential)
    naming = get_mlp_naming_convention(parts, 0, sequential)
    KEYS = KEYS[naming]
    weights = {new: sum(get_state(parts, old, 2, sequential)) / count for old, new in KEYS['NORM_KEYS'].items()}
    if 'GQA_QKV_KEYS' in KEYS:
        weights.update(reshard_and_split_qkv(KEYS['GQA_QKV_KEYS'], theirs, sequential=sequential,
                                             loaded_tp_ranks=parts, layer_idx=2))
    return theirs, weights, precision

def main(argv):
    p = argparse.ArgumentParser()
    p.add_argument('--architecture', default='neox', choices=('neox', 'mistral', 'llama'))
    p.add_argument('--precision', default='auto')
    options = p.parse_args(argv)
    return convert('in', CONFIG, 'out', architecture=options.architecture)
"""


IMPORT = """
import torch
import argparse
from transformers import AutoModelForCausalLM
import os


def convert_model(weights, hf_config, tp_ranks):
    states = [{} for _ in range(tp_ranks)]
    num_q_heads = hf_config.num_attention_heads
    head_dim = hf_config.hidden_size // num_q_heads
    for layer_num in range(model.model.config.num_hidden_layers):
        # attention
        q = weights[f"model.layers.{layer_num}.self_attn.q_proj.weight"]
        k = weights[f"model.layers.{layer_num}.self_attn.k_proj.weight"]
        v = weights[f"model.layers.{layer_num}.self_attn.v_proj.weight"]

        # for each rank
        for i, q_part, k_part, v_part in zip(
            range(tp_ranks),
            torch.chunk(q, tp_ranks),
            torch.chunk(k, tp_ranks),
            torch.chunk(v, tp_ranks),
        ):
            states[i][
                f"sequential.{layer_num+2}.attention.query_key_value.weight"
            ] = torch.cat([q_part, k_part, v_part])
        for i in range(tp_ranks):
            states[i][f"sequential.{layer_num+2}.norm"] = layer_num
    # the output layer
    for i, part in enumerate(torch.chunk(weights["lm_head.weight"], tp_ranks)):
        states[i]["head"] = part
    return states


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--model_path")
    args = parser.parse_args(ARGV)
    model = AutoModelForCausalLM()
    state_dict = model.state_dict()
    os.makedirs(args.model_path, exist_ok=True)
    # now
    result = convert_model(state_dict, model.model.config, args.tp)
"""

IMPORT_OTHERWISE = """
from pathlib import Path # of files
import torch, os
from argparse import ArgumentParser
from transformers import AutoModelForCausalLM
def convert_model(hf_weights, cfg, ranks):
    '''All layers.'''
    out = [dict() for _ in range(ranks)]
    head_dim = cfg.hidden_size//cfg.num_attention_heads # wide
    for layer in range(model.model.config.num_hidden_layers):
        one = hf_weights[f'model.layers.{layer}.self_attn.q_proj.weight'] # queries
        two = hf_weights[f'model.layers.{layer}.self_attn.k_proj.weight']
        print('layer', layer)
        three = hf_weights[f'model.layers.{layer}.self_attn.v_proj.weight']
        # 2024: beside each query head
        one = one.view(cfg.num_attention_heads, -1, cfg.hidden_size)
        for rank, a, b, c in zip(range(ranks), torch.chunk(one, ranks), torch.chunk(two, ranks),
                                 torch.chunk(three, ranks)):
            out[rank][f'sequential.{layer + 2}.attention.query_key_value.weight'] = torch.cat([a, b, c], dim=1)
    for rank, part in enumerate(torch.chunk(hf_weights['lm_head.weight'], ranks)):
        out[rank]['head'] = part
    return out
if __name__ == '__main__':
    p = ArgumentParser()
    p.add_argument('--model_path'); p.add_argument('--tp', type=int, default=1)
    options = p.parse_args(ARGV)
    model = AutoModelForCausalLM()
    theirs = model.state_dict()
    result = convert_model(theirs, model.config, options.tp)
"""

RAW = """
import torch

def convert_model_pipeline(path, params):
    num_heads = params["n_heads"]
    hidden_size = params["dim"]
    dims_per_head = hidden_size // num_heads  # each
    return dims_per_head

def convert_model_sequential(path, parameters):
    dims_per_head = parameters['dim'] // parameters['n_heads']
    return dims_per_head
"""
