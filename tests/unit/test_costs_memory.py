"""Activations of every kind of layer against what autograd saves; parameters of stages; how parts meet in the total."""

import pytest
import torch

from megatron import costs
from megatron.costs.activations import Batch, attention_bytes, layer_activations
from megatron.costs.stages import stage_parameters, stages
from megatron.model import rotary
from megatron.model.gpt2_model import build_model
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, GQA_TP4, MIXED, WIDE_NON_DIVISIBLE

LONG = dict(seq_length=300, max_position_embeddings=300)
LAYERS = {
    **{f"{kernel}_{texts}": dict(attention_config=[kernel] * 2, train_micro_batch_size_per_gpu=texts)
       for kernel in ("global", "flash", "chunked") for texts in (1, 3)},
    **{f"long_{kernel}": dict(**LONG, attention_config=[kernel] * 2) for kernel in ("global", "flash", "chunked")},
    "long_wide": dict(**LONG, attention_config=["chunked"] * 2, head_dim=128),
    "long_window": dict(**LONG, sliding_window_width=40),
    "long_dropout": dict(**LONG, attention_config=["chunked"] * 2, attention_dropout=0.1),
    **{norm: dict(norm=norm) for norm in ("rmsnorm", "scalenorm", "layernorm", "non_parametric_layernorm")},
    "zero_centered_rms": dict(norm="rmsnorm", zero_centered_gamma=True),
    "zero_centered_layernorm": dict(norm="layernorm", zero_centered_gamma=True),
    "fused_rms": dict(norm="rmsnorm", rmsnorm_fusion=True),
    **{f"qk_{kind}_{norm}": dict(qk_norm_type=kind, norm=norm)
       for kind in ("per_head", "full_width", "joint") for norm in ("rmsnorm", "layernorm")},
    **{name: dict(activation=name) for name in
       ("swiglu", "geglu", "glu", "reglu", "bilinear", "gelu", "relu", "silu", "mish", "softsign")},
    "gpt_j": dict(gpt_j_residual=True),
    "gpt_j_tied": dict(gpt_j_residual=True, gpt_j_tied=True),
    "post": dict(norm="rmsnorm", norm_placement="post"),
    "sandwich": dict(norm="rmsnorm", norm_placement="sandwich"),
    **{position: dict(pos_emb=position) for position in ("alibi", "rpe", "learned")},
    **{f"{what}_{kernel}": dict(settings, attention_config=[kernel] * 2)
       for kernel in ("global", "flash", "chunked")
       for what, settings in (
           ("v_norm", dict(v_norm=True)), ("v_norm_alone", dict(v_norm=True, pos_emb="none")),
           ("v_norm_long", dict(LONG, v_norm=True)),
           ("v_norm_one_text", dict(v_norm=True, train_micro_batch_size_per_gpu=1)),
           ("keys_are_values", dict(shared_key_value=True)),
           ("gemma4", dict(shared_key_value=True, v_norm=True, qk_norm_type="per_head", norm="rmsnorm",
                           norm_placement="sandwich", layer_scalar=True)))},
    "dropout": dict(hidden_dropout=0.1, attention_dropout=0.1),
    "softcap": dict(attn_logit_softcap=20.0),
    "no_biases": dict(use_bias_in_attn_linear=False, use_bias_in_mlp=False),
    "softmax_in_fp32": dict(attention_config=["global"] * 2, attention_softmax_in_fp32=True),
}  # fmt: skip


def saved_by_a_layer(args) -> int:
    """Bytes of the storages that autograd saves in layer 0, without its weights and the shared rotary tables."""
    model = build_model(args).train()
    layer = dict(model.local_layers())[2]
    shape = (args.seq_length, args.train_micro_batch_size_per_gpu, args.hidden_size)
    hidden = torch.randn(shape, dtype=args.params_dtype, requires_grad=True) * 1.0
    layer(hidden)  # makes the tables
    tables = [t for shared in rotary._SHARED.values() for pair in shared._whole.values() for t in pair]
    other = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *tables)}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(hidden)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in other)


def check(settings):
    for precision in ("fp32", "bfloat16"):
        args = tiny_args(**{**settings, "precision": precision})
        parts = layer_activations(args, 0, Batch.of(args, "cpu"))
        attention = attention_bytes(args, 0, Batch.of(args, "cpu"))
        assert sum(parts.values()) == saved_by_a_layer(args), (precision, parts, attention)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_exactly_what_autograd_saves(name):
    check({**WIDE_NON_DIVISIBLE, **LAYERS[name]})


@pytest.mark.parametrize("kind", ["full_width", "joint", "per_head"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_norms_of_heads_that_are_rows_apart(kind, norm):
    """With as many key heads as query heads a head's q, k and v are neighbours."""
    check({**ALL["mha"], "qk_norm_type": kind, "norm": norm})


SEVERAL = {
    **{kernel: dict(attention_config=[kernel] * 2) for kernel in ("global", "flash", "chunked")},
    "flash_one_text": dict(attention_config=["flash"] * 2, train_micro_batch_size_per_gpu=1),
    "long": dict(**LONG, attention_config=["chunked"] * 2),
    "alibi": dict(pos_emb="alibi"),
    "rpe": dict(pos_emb="rpe"),
    **{f"qk_{kind}": dict(qk_norm_type=kind, norm="rmsnorm") for kind in ("per_head", "full_width", "joint")},
    "global_layernorm": dict(attention_config=["global"] * 2, qk_norm_type="per_head", norm="layernorm"),
}


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("geometry", ["mha", "mqa"])
def test_heads_of_several_widths_in_a_layer(geometry, name):
    """Layer 0 of both: groups of 6 and 16, and of 8, 14 and 20, of which the flash kernel pads some."""
    check({**MIXED[geometry], **SEVERAL[name]})


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("kernel", ["global", "flash", "chunked"])
def test_in_every_geometry(geometry, kernel):
    check(dict(**ALL[geometry], attention_config=[kernel] * 2, activation="swiglu", norm="rmsnorm"))


def test_a_wider_head_costs_what_its_heads_take():
    """8 x the head_dim at equal hidden_size: 7 x the widths of q, k, v (the projection's output, and rotated) and the
    context, in every layer. What a formula in hidden_size alone would miss."""
    narrow, wide = (
        tiny_args(hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=d, attention_config=["chunked"] * 2,
                  pos_emb="rotary", **LONG)
        for d in (8, 64)
    )  # fmt: skip
    tokens, n, m = 600, 6, 2
    expected = 4 * tokens * (64 - 8) * ((n + 2 * m) + (n + m) + n)
    difference = sum(
        sum(layer_activations(args, 0, Batch.of(args, "cpu")).values()) * sign
        for args, sign in ((wide, 1), (narrow, -1))
    )
    assert difference == expected


def test_stages_have_all_layers_once():
    for pp, method in ((2, "type:transformer|mlp"), (3, "uniform"), (4, "parameters")):
        args = tiny_args(**WIDE_NON_DIVISIBLE, num_layers=7, pipe_parallel_size=pp, pipe_partition_method=method)
        assert [n for stage in range(pp) for n in costs.stage_layers(args, stage)] == list(range(7))


@pytest.mark.parametrize("geometry", ALL)
def test_parameters_of_stages_are_those_of_the_model(geometry):
    for settings in (dict(pos_emb="learned", norm="layernorm"), dict(qk_norm_type="full_width", norm="rmsnorm")):
        args = tiny_args(**ALL[geometry], **settings, use_bias_in_mlp=False, activation="swiglu")
        (whole,) = stages(args)
        mine = sorted(p.shape for p in stage_parameters(args, whole))
        assert sum(p.numel for p in stage_parameters(args, whole)) == costs.num_parameters(args)
        assert mine == sorted(tuple(p.shape) for p in build_model(args).parameters())


def _estimate(**settings):
    return costs.memory_per_rank(tiny_args(**{**GQA_TP4, "num_layers": 8, **settings}), device="cpu")


def test_checkpointing_keeps_inputs_and_one_group():
    args = tiny_args(**GQA_TP4, num_layers=8)
    layer = sum(layer_activations(args, 0, Batch.of(args, "cpu")).values())
    stream = 4 * 64 * 88
    everything = _estimate().activations
    for group in (1, 2, 3, 8):
        kept = _estimate(checkpoint_activations=True, checkpoint_num_layers=group).activations
        assert everything - kept == 8 * layer - (-(-8 // group) * stream + group * layer)
    partitioned = dict(checkpoint_activations=True, partition_activations=True, model_parallel_size=2)
    whole = dict(checkpoint_activations=True, model_parallel_size=2)
    assert _estimate(**whole).activations - _estimate(**partitioned).activations == 8 * stream // 2


def test_a_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    """1F1B: min(stages - stage, micro batches)."""

    def kept(stage, micro_batches):
        args = tiny_args(**GQA_TP4, num_layers=8, pipe_parallel_size=4, gradient_accumulation_steps=micro_batches)
        return costs.memory_of_stage(args, stage, device="cpu").activations

    assert kept(0, 8) == 4 * kept(0, 1) and kept(0, 3) == 3 * kept(0, 1)
    assert kept(1, 8) == 3 * kept(1, 1) and kept(3, 8) == kept(3, 1)
    args = tiny_args(**GQA_TP4, num_layers=8, pipe_parallel_size=4, gradient_accumulation_steps=8)
    every = [costs.memory_of_stage(args, stage, device="cpu").total for stage in range(4)]
    assert costs.memory_per_rank(args, device="cpu").total == max(every) == every[0]


def test_the_total_is_no_more_than_the_parts_and_no_less_than_what_always_stands():
    for stage in range(4):
        for precision in ("fp32", "bfloat16"):
            zero = dict(stage=stage, reduce_bucket_size=1000)
            estimate = _estimate(zero_optimization=zero, precision=precision, global_num_gpus=8)
            parts = (estimate.weights, estimate.gradients, estimate.optimizer, estimate.activations, estimate.logits)
            assert estimate.weights + estimate.gradients + estimate.optimizer <= estimate.total
            assert estimate.total <= sum(parts) + estimate.other


def test_more_replicas_make_zero_smaller():
    """The published table of ZeRO (Rajbhandari et al. 2020, figure 1): 16, 4 + 12/r, 2 + 14/r and 16/r bytes a
    parameter for mixed-precision Adam on r replicas."""
    settings = dict(precision="bfloat16", num_layers=8)
    numel = costs.num_parameters(tiny_args(**GQA_TP4, **settings))
    for replicas in (1, 4, 16):
        for stage, expected in ((0, 16), (1, 4 + 12 / replicas), (2, 2 + 14 / replicas), (3, 16 / replicas)):
            zero = dict(stage=stage, stage3_param_persistence_threshold=0)
            states = _estimate(**settings, zero_optimization=zero, global_num_gpus=replicas)
            found = states.weights + states.gradients + states.optimizer
            assert found == pytest.approx(expected * numel, rel=1e-3), (replicas, stage)
