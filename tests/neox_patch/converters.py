"""Models for the converters of a checkout: checkpoints that this project writes, and those of transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import tokenizers
import torch
import transformers
import yaml

from megatron.checkpointing.model_settings import inference_args
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.weights import load_weights_from
from megatron.model.gpt2_model import GPT2ModelSequential
from megatron.neox_arguments import NeoXArgs
from tests.helpers.convert_models import hf_config, hf_model
from tests.helpers.geometries import GQA_TP4, MHA_TP4, NARROW, QUOTIENT, WIDE_NON_DIVISIBLE
from tools.ckpts import reshard

PROGRAM = Path(__file__).with_name("run_converters.py")
EXPORT, IMPORT, RAW = "convert_neox_to_hf.py", "convert_hf_llama_to_neox.py", "convert_raw_llama_weights_to_neox.py"
PATH = f"tools/ckpts/{EXPORT}"
VOCABULARY, LENGTH, FFN = 512, 24, 44
"""Of CharLevelTokenizer, which needs no file; tokens of a text; width of an MLP branch."""

LLAMA_LIKE: Dict[str, Any] = dict(
    num_layers=2,
    seq_length=32,
    max_position_embeddings=32,
    pos_emb="rotary",
    rotary_emb_base=5000,
    norm="rmsnorm",
    rms_norm_epsilon=1.0e-5,
    activation="swiglu",
    intermediate_size=3 * FFN,
    use_bias_in_mlp=False,
    use_bias_in_attn_linear=False,
    no_weight_tying=True,
    tokenizer_type="CharLevelTokenizer",
)
QKN = dict(qk_norm_type="per_head")

EXPORTS = {
    "llama narrow": ("llama", NARROW),
    "llama wide": ("llama", {**NARROW, "head_dim": 56}),
    "llama mha": ("llama", MHA_TP4),
    "llama quotient mha": ("llama", QUOTIENT),
    "llama quotient gqa": ("llama", {**QUOTIENT, "num_kv_heads": 2}),
    "llama biases": ("llama", {**NARROW, "use_bias_in_attn_linear": True}),
    "llama tied mha biases": ("llama", {**MHA_TP4, "no_weight_tying": False, "use_bias_in_attn_linear": True}),
    "mistral no quotient": ("mistral", WIDE_NON_DIVISIBLE),
    "mistral mha": ("mistral", MHA_TP4),
    "mistral window": ("mistral", {**NARROW, "sliding_window_width": 6}),
    "qwen3 no quotient": ("qwen3", {**GQA_TP4, **QKN}),
    "qwen3 mha biases": ("qwen3", {**MHA_TP4, **QKN, "use_bias_in_attn_linear": True}),
    "qwen3 tied": ("qwen3", {**NARROW, **QKN, "no_weight_tying": False}),
}
"""Architecture and settings of models that are exported."""

IMPORTS = {
    "llama narrow": ("llama", NARROW, {}),
    "llama mha": ("llama", MHA_TP4, {}),
    "llama biases": ("llama", QUOTIENT, dict(attention_bias=True)),
    "mistral no quotient": ("mistral", WIDE_NON_DIVISIBLE, dict(sliding_window=7)),
    "qwen3 no quotient": ("qwen3", GQA_TP4, dict(attention_bias=True)),
    "qwen3 tied": ("qwen3", MHA_TP4, dict(tie_word_embeddings=True)),
    "qwen2": ("qwen2", {**QUOTIENT, "num_kv_heads": 2}, {}),
}
"""Model type, geometry and further keys of models of transformers that are imported."""


def write_ours(settings: Dict[str, Any], folder: Path, seed: int = 0) -> Path:
    """A checkpoint of random weights: logits of order one, no norm the identity, no bias 0. Its step's folder."""
    args = NeoXArgs.from_dict(
        {**LLAMA_LIKE, **settings, "train_micro_batch_size_per_gpu": 1, "padded_vocab_size": VOCABULARY}
    )
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, tensor in GPT2ModelSequential(args).state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[name] = tensor + noise * 0.4 if tensor.dim() == 1 else noise * 1.5 * tensor.shape[-1] ** -0.5
    step = folder / "global_step0"
    (step / "configs").mkdir(parents=True)
    (step / "configs" / "model.yml").write_text(yaml.safe_dump({**LLAMA_LIKE, **settings}))
    recorded = {"padded_vocab_size": VOCABULARY, "make_vocab_size_divisible_by": 128, "model_parallel_size": 1}
    torch.save({"module": weights, "iteration": 0, "args": recorded}, step / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step0")
    return step


def split(step: Path, folder: Path, tp: int, pp: int) -> Path:
    """The checkpoint for other parallel sizes, by this project's own tool. The new step's folder."""
    command = [str(step), str(folder), f"--model-parallel-size={tp}", f"--pipe-parallel-size={pp}"]
    assert reshard.main([*command, f"--vocab-size={VOCABULARY}"]) == 0
    return folder / "global_step0"


@torch.no_grad()
def our_logits(step: Path, configs: List[str] = ()) -> torch.Tensor:
    """[rows, LENGTH, vocabulary] of the common text, by this project's model of a checkpoint at one rank."""
    args = inference_args(CheckpointReader(str(step)), configs, length=LENGTH)
    model = GPT2ModelSequential(args).eval()
    load_weights_from(args, model, str(step))
    tokens = text()
    return model((tokens, torch.arange(LENGTH).expand_as(tokens)))


@torch.no_grad()
def their_logits(folder: Path) -> torch.Tensor:
    """The same by transformers' model in a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()(text()).logits


def text() -> torch.Tensor:
    """Tokens [2, LENGTH] that every vocabulary here has."""
    return torch.randint(0, 100, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def write_theirs(kind: str, geometry: Dict[str, int], more: Dict[str, Any], folder: Path) -> Path:
    """A model of transformers with a tokenizer, both tiny."""
    widths = {**geometry, "num_key_value_heads": geometry.get("num_kv_heads", geometry["num_attention_heads"])}
    widths.pop("num_kv_heads", None)
    config = hf_config(kind, **{"tie_word_embeddings": False, "vocab_size": VOCABULARY, **widths, **more})
    hf_model(config).save_pretrained(folder)
    model = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model)).save_pretrained(folder)
    return folder


def export_job(step: Path, settings: Dict[str, Any], out: Path, architecture: str, *more: str) -> Dict[str, Any]:
    """The job, with the settings as the YAML that the converter wants beside the checkpoint."""
    config = out.with_suffix(".yml")
    config.write_text(yaml.safe_dump({name.replace("_", "-"): value for name, value in settings.items()}))
    paths = ["--input_dir", str(step), "--config_file", str(config), "--output_dir", str(out)]
    return {"script": EXPORT, "arguments": [*paths, "--architecture", architecture, "--no_save_tokenizer", *more]}


def import_job(source: Path, out: Path, tp: int, *more: str) -> Dict[str, Any]:
    """The job."""
    return {
        "script": IMPORT,
        "arguments": ["--tp", str(tp), "--model", str(source), "--model_path", str(out), *more],
    }


def write_raw(folder: Path, heads: int, width: int, hidden: int) -> Dict[str, torch.Tensor]:
    """A model of one layer in the files that Meta and Mistral publish, without groups of queries."""
    generator, inner = torch.Generator().manual_seed(2), heads * width
    shapes = {"tok_embeddings": (8, hidden), "norm": (hidden,), "output": (8, hidden)}
    layer = {f"attention.w{part}": (inner, hidden) for part in "qkv"}
    layer.update({"attention.wo": (hidden, inner), "attention_norm": (hidden,), "ffn_norm": (hidden,)})
    layer.update({"feed_forward.w1": (FFN, hidden), "feed_forward.w2": (hidden, FFN), "feed_forward.w3": (FFN, hidden)})
    shapes.update({f"layers.0.{name}": shape for name, shape in layer.items()})
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    (folder / "mistral-7B-v0.1").mkdir(parents=True)
    torch.save(tensors, folder / "mistral-7B-v0.1" / "consolidated.00.pth")
    params = {"dim": hidden, "n_layers": 1, "n_heads": heads, "head_dim": width}
    (folder / "mistral-7B-v0.1" / "params.json").write_text(json.dumps(params))
    return tensors


def raw_job(source: Path, out: Path) -> Dict[str, Any]:
    """The job."""
    paths = ["--input_dir", str(source), "--output_dir", str(out)]
    return {"script": RAW, "arguments": [*paths, "--model_size", "mistral-7B-v0.1"]}


def run_jobs(checkout: Path, jobs: List[Dict[str, Any]], folder: Path) -> List[Optional[Dict[str, str]]]:
    """What each job ended with: None, or its error."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [str(folder / name) for name in ("jobs.json", "results.json")]
    Path(files[0]).write_text(json.dumps(jobs))
    command = [sys.executable, str(PROGRAM), str(checkout), *files]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return json.loads(Path(files[1]).read_text())
