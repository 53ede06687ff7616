"""Exports are read by transformers 4 as by 5, and what 4 saves is imported. Set up by `make test-transformers-4`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.convert.exporting import export_hf
from megatron.convert.importing import import_hf
from tests.helpers.conversion_grid import ALLOWED, largest, our_args, our_logits, quiet, save_ours
from tests.helpers.convert_models import VOCAB, text

FOLDERS = [Path(path) for path in os.environ.get("TRANSFORMERS_4", "").split(os.pathsep) if path]
if not FOLDERS:
    pytest.skip("needs releases of transformers 4: `make test-transformers-4`", allow_module_level=True)

GEOMETRIES = {
    "llama": "narrow",
    "mistral": "wide_non_divisible",
    "ministral": "narrow",
    "qwen2": "gqa_tp4",
    "qwen3": "wide_non_divisible",
    "smollm3": "wide_non_divisible",
    "granite": "wide_non_divisible",
    "gemma": "wide_non_divisible",
    "gemma2": "narrow",
    "gemma3_text": "mqa",
    "olmo2": "narrow",
    "phi": "wide_non_divisible",
    "gpt_neox": "quotient",
}
NEWER = {"4.51": ["ministral", "smollm3"]}
"""Families that a release does not have yet."""
KNOWS_LESS = {"4.51": ["qwen2"]}
"""Their logits are others: 4.51 has no windows in some of Qwen 2's layers, and its eager attention has them in all."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """{family: our logits}, and the folder of the exports."""
    quiet()
    root = tmp_path_factory.mktemp("exports")
    np.save(root / "tokens.npy", text().numpy())
    logits = {}
    for name, geometry in GEOMETRIES.items():
        checkpoint = save_ours(our_args(name, geometry), root / name / "ours")
        export_hf(str(checkpoint), str(root / name / "hf"), architecture=name, vocab_size=VOCAB, progress=False)
        logits[name] = our_logits(str(checkpoint / "global_step0"))
    return root, logits


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_exports_run_and_come_back(exported, folder, tmp_path):
    root, expected = exported
    environment = {**os.environ, "PYTHONPATH": str(folder.resolve()), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("theirs.py")), str(root)]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = json.loads(output.splitlines()[-1])
    release = ".".join(found["version"].split(".")[:2])
    assert release.startswith("4.") and folder.name.endswith(release)
    unknown = [name for name, how in found["models"].items() if how == "not known"]
    assert unknown == NEWER.get(release, [])
    problems, table = [], []
    for name, how in found["models"].items():
        if name in unknown:
            continue
        if how != "run":
            problems.append(f"{name}: {how}")
            continue
        theirs = torch.from_numpy(np.load(root / name / "logits.npy"))
        imported = import_hf(str(root / name / "resaved"), str(tmp_path / name), progress=False)
        out, back = largest(expected[name], theirs), largest(our_logits(imported), theirs)
        table.append(f"{name:12} exported {out:.1e}, saved by it and imported {back:.1e}")
        agrees = max(out, back) <= ALLOWED
        problems += [table[-1]] if agrees == (name in KNOWS_LESS.get(release, [])) else []
    print(f"\ntransformers {found['version']}\n" + "\n".join(table))
    assert not problems, "\n".join(problems)
