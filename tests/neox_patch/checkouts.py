"""Checkouts of GPT-NeoX under test: getting a state, patching it, running models in it.

From a throw-away script, with this project's root first on the path:

    from tests.neox_patch.checkouts import *
    plain = checkout_at(repository(), "ea7aefd8", "tried/plain")  # files of one commit
    new = patched(checkout_at(repository(), "ea7aefd8", "tried/new"))  # with whole_patch() applied
    ids = tokens(vocabulary=128)
    one = case("llama", dict(MODEL, num_kv_heads=2, head_dim=24), ids, do=["backward", "generate"])
    ranks = run_cases(new, [one], tp=1, folder="tried/run")["llama"]   # one dict per rank
    ranks[0]["logits"], ranks[0]["loss"], ranks[0]["grads"]["layer_02.attention.dense.weight"], ranks[0]["cached"]

repository() is $GPT_NEOX_CHECKOUT: a clone or a bare repository. A case that fails gives {"error": class,
"message", "traceback"} in the place of results.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from tools.neox_patch.changes import whole_patch
from tools.neox_patch.plan import make_plan

STATES = {
    "ea7aefd8": "newest",
    "d12c7711": "June 2025",
    "f7a5a6f9": "December 2024",
    "f5325805": "November 2024",
    "96c242eb": "GQA corrected",
}
"""Commits that must work, and what they are."""

VARIABLE = "GPT_NEOX_CHECKOUT"
PROGRAM = Path(__file__).with_name("run_model.py")

MODEL = dict(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=32,
    max_position_embeddings=32,
    norm="rmsnorm",
    rms_norm_epsilon=1.0e-12,
    pos_emb="rotary",
    rotary_pct=1,
    no_weight_tying=True,
    gpt_j_residual=False,
    output_layer_parallelism="column",
    activation="swiglu",
    bias_gelu_fusion=False,
    intermediate_size=288,
    mlp_multiple_of=32,
    use_bias_in_mlp=False,
    use_bias_in_attn_linear=False,
    scaled_upper_triang_masked_softmax_fusion=False,
    use_cpu_initialization=True,
    init_method="small_init",
    output_layer_init_method="wang_init",
    optimizer={"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1.0e-8}},
    train_micro_batch_size_per_gpu=2,
    gradient_accumulation_steps=1,
    weight_decay=0.1,
    hidden_dropout=0,
    attention_dropout=0,
    precision="fp32",
    train_iters=10,
    lr_decay_iters=10,
    lr_decay_style="cosine",
    warmup=0.1,
    distributed_backend="gloo",
    tokenizer_type="HFTokenizer",
    make_vocab_size_divisible_by=128,
    padded_vocab_size=128,
    pipe_parallel_size=0,
    model_parallel_size=1,
)
"""Arguments of a small Llama-like model (fp32, no dropout), for GPT-NeoX and for this project.

rms_norm_epsilon is so small that it does not matter where it is added: see epsilon_is_under_the_root.
"""


def repository():
    """The repository that the variable names, as a path; None if there is none."""
    value = os.environ.get(VARIABLE)
    return Path(value) if value else None


def git(repo, *arguments, text=True):
    """What a git command prints."""
    command = ["git", "-C", str(repo), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=text).stdout


def states(repo):
    """Those of STATES that the repository has."""
    return [commit for commit in STATES if _has(repo, commit)]


def _has(repo, commit):
    command = ["git", "-C", str(repo), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def same_commit(repo, one, other):
    """Whether two names are one commit."""
    return git(repo, "rev-parse", f"{one}^{{commit}}") == git(repo, "rev-parse", f"{other}^{{commit}}")


def commit_date(repo, commit):
    """The day a commit was written, say 2024-11-14."""
    return git(repo, "log", "-1", "--format=%as", commit).strip()


def checkout_at(repo, commit, folder):
    """Put the files of a commit into a new folder (kept if it is there already). Returns the folder."""
    folder = Path(folder)
    if not folder.exists():
        archive = git(repo, "archive", commit, text=False)
        folder.mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def patched(folder, plan=None):
    """Apply the patch (or a plan of it) to the files in a folder. Returns the folder.

    Raises ValueError if something is not found.
    """
    plan = plan or make_plan(Path(folder), whole_patch())
    if plan.missing:
        raise ValueError("not found:\n" + "\n".join(plan.missing))
    for path, text in plan.after.items():
        target = Path(folder) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")
    return Path(folder)


def epsilon_is_under_the_root(folder):
    """Whether RMSNorm is x / sqrt(mean square + eps), as everywhere else; until 2024 x / (root mean square + eps)."""
    return "rsqrt" in (Path(folder) / "megatron/model/norms.py").read_text()


def tokens(vocabulary=128, batch=2, length=32, seed=0):
    """Random ids, int64 [batch, length + 1]; 0, the end of a text, is not among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (batch, length + 1), generator=generator)


def case(name, args, ids, do=("backward",), **more):
    """One model and what to do with it.

    args: arguments of GPT-NeoX. do: of shapes, forward, backward, state, generate; or only config (parse the arguments;
    read=names). weights: a folder with layer files to load; None: as its initialisation draws them. prompts (lists of
    ids) and new_tokens: for generate.
    """
    return dict(name=name, args=dict(args), ids=ids, do=list(do), **{"prompts": [[5, 7, 11]], "new_tokens": 8, **more})


def run_cases(checkout, cases, tp=1, folder=None, timeout=300):
    """Run cases in a checkout, all in one process per rank. Returns {name: [result of each rank]}.

    Raises RuntimeError with the output of the processes if they do not end well.
    """
    folder = Path(folder) / f"run_{time.time_ns()}"
    folder.mkdir(parents=True)
    cases = [dict(case, args=dict(case["args"], model_parallel_size=tp)) for case in cases]
    torch.save(cases, folder / "cases.pt")
    processes = [_start(checkout, folder, rank, tp) for rank in range(tp)]
    _wait(processes, folder, timeout)
    return {
        case["name"]: [torch.load(folder / f"{case['name']}.rank{rank}.pt", weights_only=False) for rank in range(tp)]
        for case in cases
    }


def run_tests(checkout, files, folder, timeout=300):
    """Collect all tests of a checkout and run `files`: what run_tests.py writes."""
    out = Path(folder) / "tests.json"
    command = [sys.executable, str(PROGRAM.with_name("run_tests.py")), str(checkout), str(out), *files]
    options = dict(env=_environment(folder), cwd=folder, capture_output=True, text=True, timeout=timeout)
    done = subprocess.run(command, **options)
    if done.returncode:
        raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
    return json.loads(out.read_text())


def _environment(folder, rank=0, tp=1):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(tp), DS_ACCELERATOR="cpu")
    environment.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    environment["TORCH_EXTENSIONS_DIR"] = str(Path(folder) / "extensions")
    return environment


def _start(checkout, folder, rank, tp):
    command = [sys.executable, PROGRAM, checkout, folder / "cases.pt", folder, folder / "store"]
    environment = _environment(folder, rank, tp)
    with open(folder / f"rank{rank}.log", "w") as log:
        return subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment, cwd=folder)


def _wait(processes, folder, timeout):
    end = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > end or any(process.poll() for process in processes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    if any(codes):
        logs = "\n".join(
            f"--- rank {rank}\n" + (folder / f"rank{rank}.log").read_text()[-4000:] for rank in range(len(codes))
        )
        raise RuntimeError(f"the ranks ended with {codes}:\n{logs}")
