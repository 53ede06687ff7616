"""Run by a transformers 4, in a process of its own: python theirs.py FOLDER

For each model folder in FOLDER: its logits of FOLDER/tokens.npy, as logits.npy beside its weights, and the same model
saved by this transformers in `resaved`. Prints the version, and what became of each, as JSON.
"""

import json
import os
import sys

import numpy
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def main(root):
    """One line of JSON."""
    tokens = torch.from_numpy(numpy.load(os.path.join(root, "tokens.npy")))
    names = sorted(name for name in os.listdir(root) if os.path.isdir(os.path.join(root, name)))
    print(
        json.dumps({"version": transformers.__version__, "models": {name: run(root, name, tokens) for name in names}})
    )


def run(root, name, tokens):
    """How it went, in a word."""
    folder = os.path.join(root, name, "hf")
    with open(os.path.join(folder, "config.json")) as file:
        if json.load(file)["model_type"] not in CONFIG_MAPPING:
            return "not known"
    kind = transformers.AutoModelForCausalLM
    model, report = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    left = [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[key]]
    if left:
        return f"{left[0]}: {report[left[0]]}"
    with torch.no_grad():
        logits = model.eval().float()(input_ids=tokens, use_cache=False).logits
    numpy.save(os.path.join(root, name, "logits.npy"), logits.numpy())
    model.save_pretrained(os.path.join(root, name, "resaved"))
    return "run"


if __name__ == "__main__":
    main(sys.argv[1])
