"""dump_logits against a plain fp64 model, over every kind of GPT-NeoX model and every form of its checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.errors import CheckpointError, ConfigError, DataError
from tests.helpers.distributed import run_distributed
from tests.helpers.plain_model import Plain
from tests.helpers.tolerances import LOSS
from tools.ckpts import dump_logits as tool

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, ROWS, LENGTH = 256, 3, 20
LOGITS = 2e-5
"""fp32, at logits of up to about 10."""
SIZES = dict(num_layers=2, seq_length=24, max_position_embeddings=24)
LLAMA = dict(
    norm="rmsnorm",
    rms_norm_epsilon=1e-2,
    pos_emb="rotary",
    activation="swiglu",
    no_weight_tying=True,
    mlp_multiple_of=8,
)
PYTHIA = dict(pos_emb="rotary", rotary_pct=0.25, gpt_j_residual=True, no_weight_tying=True)
PLAIN_64 = dict(hidden_size=64, num_attention_heads=4)

MODELS = {
    "learned positions, tied": dict(PLAIN_64, layernorm_epsilon=1e-2),
    "sinusoidal": dict(PLAIN_64, pos_emb="sinusoidal", no_weight_tying=True),
    "alibi, 6 heads": dict(hidden_size=48, num_attention_heads=6, pos_emb="alibi", no_weight_tying=True),
    "rpe": dict(PLAIN_64, pos_emb="rpe", rpe_num_buckets=8, rpe_max_distance=16, no_weight_tying=True),
    "gpt-j residual, biases that add up": dict(PLAIN_64, **PYTHIA),
    "gpt-j residual, one norm": dict(PLAIN_64, **PYTHIA, gpt_j_tied=True, rotary_save_freqs_buffer=True),
    "tanh gelu": dict(PLAIN_64, **PYTHIA, bias_gelu_fusion=True),
    "llama mha with attention biases": dict(PLAIN_64, **LLAMA, use_bias_in_mlp=False),
    "llama mha, num_kv_heads given": dict(PLAIN_64, **LLAMA, num_kv_heads=4, intermediate_size=288),
    "gqa, rms q/k norm, head_dim": dict(
        hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=24, use_qk_layernorm=True, **LLAMA
    ),
    "qk_layernorm over the heads of a rank": dict(PLAIN_64, **PYTHIA, use_qk_layernorm=True, layernorm_epsilon=1e-2),
    "qk_layernorm, gqa": dict(
        hidden_size=64, num_attention_heads=8, num_kv_heads=2, use_qk_layernorm=True, pos_emb="rotary", rotary_pct=0.5
    ),
    "narrow head_dim": dict(hidden_size=160, num_attention_heads=4, num_kv_heads=2, head_dim=24, **LLAMA),
    "heads that do not divide the width": dict(
        hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=24, **LLAMA, use_bias_in_attn_linear=False
    ),
    "mha head_dim, exact ffn width": dict(
        hidden_size=72, num_attention_heads=4, head_dim=20, **LLAMA, ffn_hidden_size=104
    ),
    "sliding window, scale": dict(
        hidden_size=64, num_attention_heads=4, num_kv_heads=2, sliding_window_width=7, softmax_scale=0.2, **LLAMA
    ),
    "scalenorm, geglu": dict(PLAIN_64, norm="scalenorm", activation="geglu", mlp_multiple_of=4, pos_emb="none"),
    "relu, no positions": dict(PLAIN_64, activation="relu", pos_emb="none", no_weight_tying=True),
}

ELSEWHERE = {
    "pipe-parallel-size": 2,
    "model_parallel_size": 8,
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 5,
    "gradient_accumulation_steps": 1,
    "global_num_gpus": 96,
    "hostfile": "/job/no/such/hostfile",
    "data-path": "/data/no/such/text_document",
    "vocab-file": "/data/no/such/20B_tokenizer.json",
    "tokenizer_type": "HFTokenizer",
    "save": "/fsx/run",
    "load": "/fsx/run",
    "checkpoint_factor": 1000,
    "use_wandb": True,
    "wandb_project": "x",
    "tensorboard-dir": "tensorboard",
    "log-dir": "/fsx/logs",
    "fp16": {"enabled": True, "loss_scale": 0},
    "fp16_lm_cross_entropy": True,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "checkpoint-activations": True,
    "partition-activations": True,
    "sequence_parallel": True,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "min_lr": 1e-4,
    "scaled-upper-triang-masked-softmax-fusion": True,
    "attention-config": [[["flash"], 2]],
    "use_bias_in_norms": False,
    "train_impl": "dpo",
    "autotuning": {"enabled": True},
}
"""Settings of the machine and the run that the checkpoint comes from."""


def token_ids(seed=0, columns=LENGTH):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (ROWS, columns))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What the tool sets for its own process is put back."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)


def saved(name, tmp_path, **form):
    model = Plain({**SIZES, **MODELS[name]}, VOCABULARY)
    numbers = {key: value for key, value in model.c.items() if value is not None}
    model.save(tmp_path, written_config={**numbers, **ELSEWHERE}, **form)
    return model


def check(model, out, ids, tp=1):
    logits = np.load(out)
    assert logits.dtype == np.float32 and logits.shape == (ROWS, LENGTH, VOCABULARY)
    expected = model.logits(torch.from_numpy(ids), tp).numpy()
    assert 1 < np.abs(expected).max() < 40
    return np.abs(logits - expected).max()


@pytest.mark.parametrize("sequential", [False, True], ids=["layer files", "sequential"])
@pytest.mark.parametrize("name", MODELS)
def test_one_rank(name, sequential, tmp_path):
    model, ids = saved(name, tmp_path, sequential=sequential), token_ids()
    assert tool.dump_logits(str(tmp_path), ids, str(tmp_path / "out.npy")) is None
    assert check(model, tmp_path / "out.npy", ids) < LOGITS
    assert not list(tmp_path.glob("*.writing"))


def _compute_all(rank, world_size, jobs, ids):
    return [tool.compute(job, ids) for job in jobs]


def test_two_ranks(tmp_path):
    """Every model, from two ranks' files, layer files and sequential in turn; and the loss, equal to the definition."""
    ids, jobs, models = token_ids(columns=LENGTH + 1), [], []
    for number, name in enumerate(MODELS):
        folder = tmp_path / str(number)
        models.append(saved(name, folder, tp=2, sequential=bool(number % 2)))
        jobs.append({**tool.plan(str(folder), ids, str(folder / "out.npy"), labels_from_tokens=True), "batch_size": 2})
    assert [job["settings"]["model_parallel_size"] for job in jobs] == [2] * len(MODELS)
    losses, nothing = run_distributed(2, _compute_all, jobs, ids, tmp_path=tmp_path)
    assert nothing == [None] * len(MODELS)
    faults = {}
    for number, (name, model) in enumerate(zip(MODELS, models, strict=True)):
        difference = check(model, tmp_path / str(number) / "out.npy", ids[:, :-1], tp=2)
        expected = F.cross_entropy(
            model.logits(torch.from_numpy(ids[:, :-1]), 2).flatten(0, 1), torch.from_numpy(ids[:, 1:]).flatten()
        )
        if not (difference < LOGITS and abs(losses[number] - expected.item()) < LOSS):
            faults[name] = difference, losses[number] - expected.item()
    assert not faults


def test_two_ranks_files_on_one_rank(tmp_path):
    """The same function, but for a norm over the heads of a rank, whose function depends on their number."""
    ids, out = token_ids(), str(tmp_path / "out.npy")
    faults = {}
    for number, name in enumerate(MODELS):
        model = saved(name, tmp_path / str(number), tp=2)
        tool.dump_logits(str(tmp_path / str(number)), ids, out, model_parallel_size=1)
        difference = check(model, out, ids)
        depends = model.c["use_qk_layernorm"] and model.c["norm"] == "layernorm"
        if not difference < LOGITS:
            faults[name] = difference
        elif depends:
            assert check(model, out, ids, tp=2) > 1e-3
    assert not faults


def command_line(*arguments):
    command = [sys.executable, "tools/ckpts/dump_logits.py", *map(str, arguments)]
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}  # as inside another job
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)


def test_command_line_starts_its_own_ranks(tmp_path):
    """From the step's folder under another name, with a config of its own; only the loss goes to stdout."""
    name = "gpt-j residual, biases that add up"
    model, ids = saved(name, tmp_path, tp=2), token_ids(columns=LENGTH + 1)
    (tmp_path / "global_step7" / "configs" / "model.yml").rename(tmp_path / "elsewhere.yml")
    (tmp_path / "global_step7").rename(tmp_path / "a copy")
    np.save(tmp_path / "ids.npy", ids.astype(np.int32))
    common = ["--checkpoint", tmp_path / "a copy", "--tokens", tmp_path / "ids.npy", "--out", tmp_path / "out.npy"]
    done = command_line(
        *common, "--config", tmp_path / "elsewhere.yml", "--model-parallel-size", 2, "--labels-from-tokens"
    )
    assert done.returncode == 0, done.stderr
    assert check(model, tmp_path / "out.npy", ids[:, :-1]) < LOGITS
    word, loss = done.stdout.split()
    expected = F.cross_entropy(
        model.logits(torch.from_numpy(ids[:, :-1])).flatten(0, 1), torch.from_numpy(ids[:, 1:]).flatten()
    )
    assert word == "loss" and abs(float(loss) - expected.item()) < LOSS
    assert f"{ROWS}/{ROWS}" in done.stderr and "arning" not in done.stderr  # progress, and nothing else

    before = (tmp_path / "out.npy").read_bytes()
    failed = command_line(*common, "--model-parallel-size", 2)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ") and "--config" in failed.stderr and "Traceback" not in failed.stderr
    assert (tmp_path / "out.npy").read_bytes() == before


def test_half_precision_weights_are_computed_in_fp32(tmp_path):
    model = Plain({**SIZES, **MODELS["narrow head_dim"]}, VOCABULARY)
    model.weights = {key: value.bfloat16().float() for key, value in model.weights.items()}
    model.save(tmp_path, dtype=torch.bfloat16)
    ids, out = token_ids(), str(tmp_path / "out.npy")
    tool.dump_logits(str(tmp_path), ids, out)
    assert check(model, out, ids) < LOGITS
    tool.dump_logits(str(tmp_path), ids, out, precision="bfloat16")
    assert 1e-3 < check(model, out, ids) < 1.0


def test_rows_up_to_max_position_embeddings(tmp_path):
    """Longer than the run's seq_length, as far as the model has positions."""
    model = Plain({**SIZES, **MODELS["learned positions, tied"], "seq_length": 8}, VOCABULARY)
    model.save(tmp_path)
    tool.dump_logits(str(tmp_path), token_ids(), str(tmp_path / "out.npy"))
    assert check(model, tmp_path / "out.npy", token_ids()) < LOGITS
    with pytest.raises(ConfigError, match="max_position_embeddings=24: rows of 25 tokens"):
        tool.dump_logits(str(tmp_path), token_ids(columns=25), str(tmp_path / "out.npy"))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(hidden_sise=3), "hidden_sise is not a setting; did you mean hidden_size"),
        (dict(moe_num_experts=4), "moe_num_experts=4"),
        (dict(use_mup=True), "use_mup"),
        (dict(te_mha=True, pos_emb="alibi"), "te_mha"),
        (dict(te_fp8_mha=True, pos_emb="alibi"), "te_mha"),
        (dict(attention_config=[[["mamba"], 2]]), "mamba"),
        (dict(head_dim=32), r"attention.dense.weight: shape \[64, 64\] in the checkpoint, \[64, 128\]"),
        (dict(num_layers=None), "num_layers is not set"),
    ],
)
def test_configs_of_other_models_are_refused(changes, message, tmp_path):
    model = Plain({**SIZES, **MODELS["llama mha with attention biases"]}, VOCABULARY)
    model.save(tmp_path, written_config={**model.c, **changes})
    with pytest.raises((ConfigError, CheckpointError), match=message):
        tool.dump_logits(str(tmp_path), token_ids(), str(tmp_path / "out.npy"))
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize(
    "ids, message",
    [
        (np.full((2, 4), VOCABULARY), f"ids run from {VOCABULARY} to {VOCABULARY}; this model's are 0 to 255"),
        (np.full((2, 4), -1), "ids run from -1 to -1"),
        (np.zeros((0, 4), int), "at least one row"),
        (np.zeros((2, 1), int), "at least one row of 2 or more"),
    ],
)
def test_unusable_tokens_are_named(ids, message, tmp_path):
    saved("tanh gelu", tmp_path)
    with pytest.raises(DataError, match=message):
        tool.dump_logits(str(tmp_path), ids, str(tmp_path / "out.npy"), labels_from_tokens=True)


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        tool.load_tokens(str(tmp_path / "ids.npy"))
    np.save(tmp_path / "floats.npy", np.zeros((2, 3)))
    np.save(tmp_path / "flat.npy", np.zeros(3, int))
    np.save(tmp_path / "objects.npy", np.array([[1, None]]), allow_pickle=True)
    (tmp_path / "text.npy").write_text("1 2 3")
    for name, message in (
        ("floats", "float64"),
        ("flat", r"int64 \[3\]"),
        ("objects", "not an array"),
        ("text", "not"),
    ):
        with pytest.raises(DataError, match=message):
            tool.load_tokens(str(tmp_path / f"{name}.npy"))
    with pytest.raises(CheckpointError, match="no such folder"):
        tool.dump_logits(str(tmp_path / "none"), token_ids(), "out.npy")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        tool.dump_logits(str(tmp_path), token_ids(), "out.npy")
    saved("tanh gelu", tmp_path / "run")
    with pytest.raises(DataError, match="there is no folder"):
        tool.dump_logits(str(tmp_path / "run"), token_ids(), str(tmp_path / "none" / "out.npy"))
    with pytest.raises(CheckpointError, match="iteration=3"):
        tool.dump_logits(str(tmp_path / "run"), token_ids(), "out.npy", iteration=3)


def test_a_rank_that_fails_ends_the_others_and_says_why(tmp_path):
    """A file damaged for one rank only: found after the ranks have started."""
    saved("tanh gelu", tmp_path, tp=2)
    path = tmp_path / "global_step7" / "layer_03-model_01-model_states.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="layer_03-model_01"):
        tool.dump_logits(str(tmp_path), token_ids(), str(tmp_path / "out.npy"))
    assert not (tmp_path / "out.npy").exists()


def test_each_setting_of_the_model_is_taken_or_known_not_to_matter():
    """A new argument of the model must be put into one of the two sets, or the tool would drop it silently."""
    from megatron.checkpointing.model_settings import FUNCTION_SETTINGS, UNBUILT_FUNCTION_SETTINGS
    from megatron.neox_arguments.fields import NeoXArgsAttention, NeoXArgsModel, NeoXArgsMoE
    from megatron.neox_arguments.support import NO_EFFECT_ON_RESULTS, REFUSED

    not_the_function = """
        precision fp16_lm_cross_entropy init_method init_method_std output_layer_init_method use_cpu_initialization
        te_columnparallel te_rowparallel te_fp8_mha te_fp8_format te_fp8_wgrad te_fp8_amax_history_len
        te_fp8_amax_compute_algo te_fp8_margin
    """.split()
    groups = (NeoXArgsModel, NeoXArgsMoE, NeoXArgsAttention)
    names = {name for group in groups for name in group.__dataclass_fields__}
    taken = FUNCTION_SETTINGS | UNBUILT_FUNCTION_SETTINGS
    assert names - taken - set(NO_EFFECT_ON_RESULTS) - set(REFUSED) == set(not_the_function)
    assert UNBUILT_FUNCTION_SETTINGS <= set(REFUSED)
