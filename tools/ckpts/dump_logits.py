"""Writes the logits of a checkpoint for given tokens, to compare two implementations or two checkpoints.

python tools/ckpts/dump_logits.py --checkpoint runs/x --tokens ids.npy --out logits.npy --labels-from-tokens

The checkpoint may be of any GPT-NeoX form and parallel layout, the machine needs neither a GPU nor the run's data.
"""

import argparse
import os
import sys
import threading
from contextlib import redirect_stdout
from typing import Any, Dict, List, Optional, Sequence, Tuple

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: exact fp32, and as many ranks as asked for

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron.checkpointing.model_settings import checkpoint_folder, inference_args  # noqa: E402
from megatron.checkpointing.reader import CheckpointReader  # noqa: E402
from megatron.entry import run_main  # noqa: E402
from megatron.errors import ConfigError, DataError  # noqa: E402
from tools.ckpts.local_ranks import describe_process, run_on_ranks  # noqa: E402


def dump_logits(
    checkpoint: str,
    tokens: np.ndarray,
    out: str,
    configs: Sequence[str] = (),
    model_parallel_size: Optional[int] = None,
    precision: str = "fp32",
    labels_from_tokens: bool = False,
    batch_size: int = 1,
    iteration: Optional[int] = None,
) -> Optional[float]:
    """Write the logits fp32 [b, s, padded vocabulary] of token ids [b, s] to `out`; returns the loss, if asked for.

    checkpoint: a checkpoint's folder, or the folder of a run's checkpoints. labels_from_tokens: tokens are [b, s + 1],
    and each position but the last predicts the next one; the loss is the mean cross entropy in nats.
    model_parallel_size ranks are started if it is more than 1; by default as many as the checkpoint was split over.

    Raises ConfigError, CheckpointError or DataError; `out` is then what it was before.
    """
    job = plan(checkpoint, tokens, out, configs, model_parallel_size, precision, labels_from_tokens, iteration)
    job["batch_size"] = batch_size
    return run_on_ranks(job["settings"]["model_parallel_size"], compute, job, tokens)


def plan(
    checkpoint: str,
    tokens: np.ndarray,
    out: str,
    configs: Sequence[str] = (),
    model_parallel_size: Optional[int] = None,
    precision: str = "fp32",
    labels_from_tokens: bool = False,
    iteration: Optional[int] = None,
) -> Dict[str, Any]:
    """Check everything that can be checked without computing, and return the job for `compute` on each rank.

    Arguments and errors as for dump_logits.
    """
    folder = checkpoint_folder(checkpoint, iteration)
    length = tokens.shape[1] - labels_from_tokens
    args = inference_args(CheckpointReader(folder), configs, model_parallel_size, precision, length)
    _check_tokens(tokens, args.padded_vocab_size, labels_from_tokens)
    _check_out(out)
    return dict(folder=folder, out=out, labels=labels_from_tokens, batch_size=1, settings=args.given())


def compute(job: Dict[str, Any], tokens: np.ndarray) -> Optional[float]:
    """What each rank does: build the model, fill it, run it. Rank 0 writes, and returns the loss if there are labels.

    job: `settings` of NeoXArgs, `folder` of the checkpoint, `out`, `labels` (whether tokens are [b, s + 1]),
    `batch_size`.
    """
    from megatron.checkpointing.weights import load_weights_from
    from megatron.initialize import initialize_megatron
    from megatron.logging.quiet import quiet_libraries, without_library_prints
    from megatron.model.gpt2_model import build_model
    from megatron.neox_arguments import NeoXArgs

    args = NeoXArgs.from_dict(job["settings"])
    with redirect_stdout(sys.stderr):  # stdout is for the loss
        quiet_libraries(args)
        initialize_megatron(args)
        with without_library_prints(args):
            model = build_model(args)
        load_weights_from(args, model, job["folder"])
    model.eval()
    if args.rank != 0:
        for rows in _batches(tokens, job):
            _logits(model, rows[0])
        return None
    return _write(model, tokens, job, args.padded_vocab_size)


def _write(model, tokens: np.ndarray, job: Dict[str, Any], vocabulary: int) -> Optional[float]:
    rows, length = tokens.shape[0], tokens.shape[1] - job["labels"]
    temporary = f"{job['out']}.writing"
    total = 0.0
    try:
        written = np.lib.format.open_memmap(temporary, "w+", np.float32, (rows, length, vocabulary))
        tqdm.set_lock(threading.RLock())  # its own would be a semaphore, which a rank that ends at once leaves behind
        with tqdm(total=rows, unit=" rows", desc="logits", file=sys.stderr) as bar:
            start = 0
            for inputs, labels in _batches(tokens, job):
                logits = _logits(model, inputs)
                written[start : start + len(inputs)] = logits.numpy()
                start += len(inputs)
                if labels is not None:
                    total += _summed_loss(logits, labels)
                bar.update(len(inputs))
        written.flush()
        os.replace(temporary, job["out"])
    except OSError as error:
        raise DataError(f"--out {job['out']}: cannot be written ({error})") from None
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    return total / (rows * length) if job["labels"] else None


@torch.no_grad()
def _logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """[b, s] -> fp32 [b, s, v] on every rank."""
    from megatron import mpu

    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return mpu.gather_from_model_parallel_region(model((tokens, positions))).float()


def _summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum").item()


def _batches(tokens: np.ndarray, job: Dict[str, Any]) -> List[Tuple[torch.Tensor, Optional[torch.Tensor]]]:
    """(inputs [b, s], labels [b, s] or None) of each batch."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    parts = ids.split(job["batch_size"])
    if not job["labels"]:
        return [(part.contiguous(), None) for part in parts]
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]


def load_tokens(path: str) -> np.ndarray:
    """Token ids [b, s] from a .npy file. Raises DataError."""
    try:
        tokens = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"--tokens {path}: no such file") from None
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"--tokens {path}: not an array as numpy.save writes it ({error})") from None
    if not isinstance(tokens, np.ndarray) or not np.issubdtype(tokens.dtype, np.integer) or tokens.ndim != 2:
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "several arrays"
        raise DataError(f"--tokens {path}: whole numbers [rows, tokens] are wanted, the file holds {found}")
    return tokens


def _check_tokens(tokens: np.ndarray, vocabulary: int, labels: bool) -> None:
    least = 1 + labels
    if tokens.shape[0] < 1 or tokens.shape[1] < least:
        raise DataError(f"--tokens: at least one row of {least} or more tokens is needed, not {list(tokens.shape)}")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise DataError(
            f"--tokens: ids run from {tokens.min()} to {tokens.max()}; this model's are 0 to {vocabulary - 1}"
        )


def _check_out(out: str) -> None:
    parent = os.path.dirname(os.path.abspath(out))
    if os.path.isdir(out) or not os.path.isdir(parent):
        raise DataError(f"--out {out}: {'is a folder' if os.path.isdir(out) else f'there is no folder {parent}'}")


def main(input_args: Optional[List[str]] = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the logits of a checkpoint for given tokens.")
    parser.add_argument("--checkpoint", required=True, help="a global_step<N> folder, or the folder these are in")
    parser.add_argument("--iteration", type=int, help="which checkpoint of a run (default: the one `latest` names)")
    parser.add_argument("--config", nargs="+", default=[], help="the model's YAML files (default: the checkpoint's)")
    parser.add_argument("--tokens", required=True, help="token ids, .npy, whole numbers [b, s]")
    parser.add_argument("--out", required=True, help="where to write the logits, .npy, fp32 [b, s, padded vocabulary]")
    parser.add_argument("--model-parallel-size", type=int, help="processes to start (default: the checkpoint's)")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bfloat16"), default="fp32", help="of the computation")
    parser.add_argument("--batch-size", type=int, default=1, help="rows computed at a time")
    parser.add_argument(
        "--labels-from-tokens", action="store_true", help="tokens are [b, s + 1]; print the loss of predicting them"
    )
    given = vars(parser.parse_args(input_args))
    for name in ("batch_size", "model_parallel_size"):
        if given[name] is not None and given[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {given[name]} must be at least 1")
    given["configs"] = given.pop("config")
    describe_process(0, 1)  # this is not a rank of the job in which it may have been started
    loss = dump_logits(**{**given, "tokens": load_tokens(given["tokens"])})
    if loss is not None:
        print(f"loss {loss:.9g}", flush=True)


if __name__ == "__main__":
    run_main(main)
