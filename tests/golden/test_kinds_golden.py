"""Every kind of model against GPT-NeoX itself: logits, and the losses of three optimizer steps.

data_kinds/results.json was made by GPT-NeoX on weights filled as `fill` does here, so it needs no checkpoints.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from megatron.neox_arguments import NeoXArgs
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import FORWARD, LOSS, TRAJECTORY

RESULTS = json.loads((Path(__file__).parent / "data_kinds" / "results.json").read_text())
ROWS, STEPS = 2, 3
PLACES = ((0, 31), (1, 5))
"""Row and position of the logits that are compared; of each the first COLUMNS."""
COLUMNS = 5
ABOUT_ONE = ("norm.weight", ".scale", ".g")


def fill(model) -> None:
    """Weights that depend on the layer's index and the parameter's name only."""
    with torch.no_grad():
        for index, layer in model.local_layers():
            if isinstance(layer, torch.nn.Module):
                for name, parameter in layer.named_parameters():
                    random = np.random.RandomState(zlib.crc32(f"{index}.{name}".encode()))
                    values = 0.12 * random.standard_normal(tuple(parameter.shape)) + name.endswith(ABOUT_ONE)
                    parameter.copy_(torch.from_numpy(values))


def sequences(step: int, vocabulary: int, length: int) -> torch.Tensor:
    """int64 [ROWS, length + 1]"""
    return torch.from_numpy(np.random.RandomState(step).randint(0, vocabulary, (ROWS, length + 1)))


def results_of(settings):
    """Logits at PLACES and the losses of STEPS steps."""
    from megatron.training import train_step
    from tests.helpers.engines import build_engine

    args = NeoXArgs.from_dict({**settings, "global_num_gpus": 1})
    args.build_tokenizer()
    engine = build_engine(args)
    fill(engine.module)
    tokens = sequences(99, args.padded_vocab_size, args.seq_length)[:, :-1]
    with torch.no_grad():
        logits = engine.module.eval()((tokens, torch.arange(args.seq_length).expand_as(tokens)))
    engine.train()
    batches = ({"text": sequences(step, args.padded_vocab_size, args.seq_length)} for step in range(STEPS))
    losses = [train_step(args, engine, batches)["loss"] for _ in range(STEPS)]
    return [logits[place][:COLUMNS].tolist() for place in PLACES], losses


def all_results(rank, world_size):
    """{name: results_of}; every second case in the form of a pipeline, whose numbers are the same."""
    return {
        name: results_of({**RESULTS["settings"], **case["settings"], "pipe_parallel_size": number % 2})
        for number, (name, case) in enumerate(RESULTS["cases"].items())
    }


def differences(name, result):
    """Of a case's results_of from GPT-NeoX's: the largest of the logits, and that of each step's loss."""
    case, (logits, losses) = RESULTS["cases"][name], result
    apart = np.abs(np.array(logits) - np.array(case["logits"])).max()
    return apart, np.abs(np.array(losses) - np.array(case["losses"]))


def test_every_kind_of_model_computes_and_trains_as_gpt_neox(tmp_path):
    (found,) = run_distributed(1, all_results, tmp_path=tmp_path)
    wrong = []
    for name, result in found.items():
        apart, losses_apart = differences(name, result)
        if not (apart <= FORWARD[torch.float32] and losses_apart[0] <= LOSS and losses_apart.max() <= TRAJECTORY):
            wrong.append(f"{name}: logits {apart:.1e}, losses {losses_apart.max():.1e}")
    assert not wrong, "\n".join(wrong)


def test_the_cases_can_tell_kinds_apart():
    losses = {round(case["losses"][0], 5) for case in RESULTS["cases"].values()}
    assert len(losses) == len(RESULTS["cases"]) >= 40
