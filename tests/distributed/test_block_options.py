"""Models with Gemma 2's, Gemma 3's and OLMo 2's blocks over ranks: initial weights, losses, gradients and logits."""

import numpy as np
import pytest
import torch

from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model
from megatron.text_generation.runner import InferenceRunner
from tests.distributed.test_model_pipeline import _assert_same_training, _train_pipeline, _train_sequential
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4
from tests.helpers.model_runs import batch, disturb, forward_backward
from tests.helpers.tolerances import FORWARD, GRADIENT, LOSS

SHAPE = dict(GQA_TP4, norm="rmsnorm", ffn_hidden_size=44, use_bias_in_mlp=False, use_bias_in_attn_linear=False)
GEMMA = dict(
    SHAPE,
    norm_placement="sandwich",
    zero_centered_gamma=True,
    activation="geglu_tanh",
    embedding_multiplier=88**0.5,
    no_weight_tying=False,
    sliding_window_width=5,
)
GEMMA2 = dict(
    GEMMA,
    layer_types=["sliding_attention", "full_attention"],
    softmax_scale=0.4,
    attn_logit_softcap=0.9,
    final_logit_softcap=0.7,
)
GEMMA3 = dict(
    GEMMA,
    num_layers=3,
    layer_types=[[["sliding_attention", "sliding_attention", "full_attention"], "all"]],
    rotary_emb_base={"full_attention": 5000.0, "sliding_attention": 300.0},
    rope_scaling={"full_attention": {"rope_type": "linear", "factor": 8.0}},
    qk_norm_type="per_head",
)
OLMO2 = dict(SHAPE, norm_placement="post", qk_norm_type="full_width", activation="swiglu")
CASES = {
    "gemma 2": GEMMA2,
    "gemma 2, sequence parallel, untied": dict(GEMMA2, sequence_parallel=True, no_weight_tying=True),
    "gemma 3": GEMMA3,
    "gemma 3, sequence parallel": dict(GEMMA3, sequence_parallel=True),
    "olmo 2": OLMO2,
    "olmo 2, sequence parallel": dict(OLMO2, sequence_parallel=True),
    "biases and learned positions": dict(
        GQA_TP4,
        norm_placement="sandwich",
        pos_emb="learned",
        use_bias_in_output_layer=True,
        embedding_multiplier=3.0,
        final_logit_softcap=0.7,
        sequence_parallel=True,
    ),
}
ON_RANKS = {2: tuple(CASES), 4: ("gemma 3, sequence parallel", "olmo 2")}
PIPED = {1: "gemma 2", 2: "biases and learned positions"}
"""On two stages, by their tensor-parallel size."""


def _last_logits(settings, **layout):
    """Logits of the last token by prefill and decode, as generation gets them; None on other stages."""
    ranks = max(layout.get("pipe_parallel_size", 0), 1) * layout.get("model_parallel_size", 1)
    args = tiny_args(**{**settings, "sequence_parallel": False}, **layout, global_num_gpus=ranks)
    initialize_megatron(args)
    model = build_model(args)
    disturb(model, args)
    if args.pipe_parallel_size > 1:
        model._synchronize_tied_weights()
    tokens, positions = batch()[0]
    runner = InferenceRunner(args, model)
    runner.start(batch_size=2, max_tokens=tokens.shape[1])
    runner.next_token_logits(tokens[:, :9], positions[:, :9])
    logits = [runner.next_token_logits(tokens[:, i : i + 1], positions[:, i : i + 1]) for i in range(9, 16)][-1]
    return None if logits is None else logits.numpy()


def _whole_text_logits(settings):
    args = tiny_args(**settings, global_num_gpus=1)
    initialize_megatron(args)
    model = build_model(args)
    disturb(model, args)
    with torch.no_grad():
        return model(batch()[0])[:, -1].numpy()


def _rank(rank, ranks):
    return {
        name: (
            forward_backward(dict(settings, model_parallel_size=ranks)),
            _last_logits(settings, model_parallel_size=ranks),
        )
        for name, settings in CASES.items()
        if name in ON_RANKS.get(ranks, CASES)
    }


def _single(rank, ranks):
    texts = {name: _whole_text_logits(settings) for name, settings in CASES.items()}
    return _rank(rank, ranks), texts, {name: _train_sequential(CASES[name]) for name in PIPED.values()}


def _stage(rank, ranks, tp):
    settings = CASES[PIPED[tp]]
    return _train_pipeline(settings, 2, tp), _last_logits(settings, pipe_parallel_size=2, model_parallel_size=tp)


def _assert_equal(name, one, many):
    loss, initial, gradients = many
    assert abs(loss - one[0]) <= LOSS, f"{name}: loss {loss} is not {one[0]}"
    assert initial.keys() == one[1].keys() == gradients.keys() == one[2].keys(), name
    for key, values in initial.items():
        assert np.array_equal(values, one[1][key]), f"{name}: initial {key} depends on the layout"
    for key, values in gradients.items():
        size = np.abs(one[2][key]).max()
        difference = np.abs(values - one[2][key]).max()
        assert difference <= GRADIENT[torch.float32] * max(size, 1e-2), f"{name}: {key} {difference:.2g} of {size:.2g}"


def _assert_logits(name, actual, wanted):
    assert actual.shape == wanted.shape, f"{name}: {actual.shape}"
    assert np.abs(wanted).max() > 0.5, f"{name}: nothing to compare"
    assert np.abs(actual - wanted).max() <= FORWARD[torch.float32], f"{name}: {np.abs(actual - wanted).max():.2g}"


@pytest.mark.timeout(120)
def test_ranks_and_stages_equal_one_rank(tmp_path):
    ((runs, texts, trained),) = run_distributed(1, _single, tmp_path=tmp_path)
    for name in CASES:
        _assert_logits(name, runs[name][1], texts[name])
    for ranks in ON_RANKS:
        for rank in run_distributed(ranks, _rank, tmp_path=tmp_path):
            for name, (run, logits) in rank.items():
                _assert_equal(f"TP {ranks}, {name}", runs[name][0], run)
                _assert_logits(f"TP {ranks}, {name}", logits, texts[name])
    for tp, name in PIPED.items():
        stages = run_distributed(2 * tp, _stage, tp, tmp_path=tmp_path)
        _assert_same_training(name, trained[name], [training for training, _ in stages])
        given = [logits for _, logits in stages if logits is not None]
        assert len(given) == tp
        for logits in given:
            _assert_logits(f"PP 2 TP {tp}, {name}", logits, texts[name])
