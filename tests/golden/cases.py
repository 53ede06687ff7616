"""The models whose weights and results GPT-NeoX itself wrote: see data/README.md."""

import json
from pathlib import Path

import numpy as np
import torch
import yaml

from megatron.neox_arguments import NeoXArgs

DATA = Path(__file__).parent / "data"
NUM_LAYERS = 2
EMBEDDING, NORM, HEAD = 0, NUM_LAYERS + 3, NUM_LAYERS + 4
VOCABULARY = {"case3_mha_qk_layernorm": 384}
TP1 = ("case1_pythia_mha", "case2_llama_gqa", "case3_mha_qk_layernorm", "case5_headdim32_gqa")
TP2 = ("case1_pythia_mha", "case2_llama_gqa", "case5_headdim32_gqa")


def vocabulary(case):
    """Rows of the (padded) vocabulary."""
    return VOCABULARY.get(case, 512)


def arguments(case, tp=1, pp=0, **overrides):
    """The case's config at a parallel layout."""
    values = yaml.safe_load((DATA / case / "config.yml").read_text())
    values.update(model_parallel_size=tp, pipe_parallel_size=pp, padded_vocab_size=vocabulary(case), **overrides)
    return NeoXArgs.from_dict(values)


def layer_state(case, tp, rank, index):
    """State dict of one layer as GPT-NeoX wrote it at this TP size and rank."""
    if index in (EMBEDDING, HEAD):
        return _vocabulary_layer(case, tp, rank, index)
    path = DATA / case / f"tp{tp}_pp1" / f"layer_{index:02d}-model_{rank:02d}-model_states.pt"
    return torch.load(path, weights_only=True)


def _vocabulary_layer(case, tp, rank, index):
    """All cases share the first rows of one table; a rank holds its part of the rows."""
    path = DATA / "common" / f"layer_{index:02d}-model_00-model_states.pt"
    rows = vocabulary(case) // tp
    return {
        name: tensor[rank * rows : (rank + 1) * rows].clone()
        for name, tensor in torch.load(path, weights_only=True).items()
    }


def load(model, case, tp, rank):
    """Put the case's weights into a model, strictly, by layer index."""
    for index, layer in model.local_layers():
        if isinstance(layer, torch.nn.Module):
            layer.load_state_dict(layer_state(case, tp, rank, index), strict=True)


def write_checkpoint(case, tp, folder):
    """Complete layer files of a case, in GPT-NeoX's layout, into an existing folder."""
    for rank in range(tp):
        for index in (EMBEDDING, 2, 3, NORM, HEAD):
            path = Path(folder) / f"layer_{index:02d}-model_{rank:02d}-model_states.pt"
            torch.save(layer_state(case, tp, rank, index), path)


def tokens_and_labels(case):
    """int64 [2, seq], [2, seq]."""
    ids = torch.from_numpy(np.load(DATA / case / "input_ids.npy"))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def expected(case, tp, rank=0):
    """(logits of every 4th position [2, seq/4, v], loss, {layer_NN.name: gradient statistics of this rank})."""
    folder = DATA / case / f"tp{tp}_pp1"
    logits = torch.from_numpy(np.load(folder / "logits_every_4th.npy"))
    loss = json.loads((folder / "loss.json").read_text())["loss"]
    return logits, loss, json.loads((folder / f"grad_norms_rank{rank:02d}.json").read_text())
