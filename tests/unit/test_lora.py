"""Adapters: the function and its gradients against weights merged by hand in fp64, what is trained, what is refused."""

import pytest
import torch

from megatron.checkpointing.model_settings import checkpoint_folder, inference_args
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.stamp import write_stamp
from megatron.checkpointing.weights import load_weights_from
from megatron.convert.exporting import export_hf
from megatron.errors import CheckpointError, ConfigError, ConversionError
from megatron.model.gpt2_model import build_model, cross_entropy
from megatron.model.utils import get_params_for_weight_decay_optimization
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.lora import TARGETS
from megatron.training import setup_model_and_optimizer
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MHA, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import batch
from tests.helpers.resharding import random_layers, read_all, settings_of, write_checkpoint
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close
from tools.ckpts import convert_te, export_lora, grow_head_dim, merge_lora, reshard
from tools.head_dim import __main__ as head_dim

ALL = dict(rank=3, alpha=7.5, targets=list(TARGETS))
SCALE = 2.5
CASES = {
    "per rank, gated": dict(**WIDE_NON_DIVISIBLE, activation="swiglu", ffn_hidden_size=44, norm="rmsnorm"),
    "per head, side by side": dict(**MHA, gpt_j_residual=True),
}


def parts_by_hand(args, target):
    """The part of each row of a fused weight, one row at a time."""
    geometry = args.head_geometry()
    heads, kv_heads, width = geometry.num_attention_heads, geometry.num_kv_heads, geometry.head_dim
    if target == "query_key_value" and kv_heads == heads:
        return [part for _ in range(heads) for part in range(3) for _ in range(width)]
    if target == "query_key_value":
        return [0] * (heads * width) + [1] * (kv_heads * width) + [2] * (kv_heads * width)
    if target == "linear1" and args.activation == "swiglu":
        return [0] * 44 + [1] * 44
    return None


def addend(args, target, A, B):
    """What an adapter adds to the whole weight, in fp64."""
    A, B, parts = A.double(), B.double(), parts_by_hand(args, target)
    if parts is None:
        return SCALE * B @ A
    return torch.stack([SCALE * B[row] @ A[3 * part : 3 * part + 3] for row, part in enumerate(parts)])


def gradients_by_hand(args, target, A, B, of_weight):
    """(dA, dB) from the gradient of the weight that the two are a part of."""
    A, B = (tensor.detach().double().requires_grad_() for tensor in (A, B))
    (addend(args, target, A, B) * of_weight.double()).sum().backward()
    return A.grad, B.grad


def with_random_adapters(args):
    model, generator = build_model(args), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("recomputed", (False, True))
@pytest.mark.parametrize("case", CASES)
def test_the_function_and_its_gradients(case, recomputed):
    args = tiny_args(**CASES[case], lora=ALL, checkpoint_activations=recomputed)
    model, plain = with_random_adapters(args), build_model(args.update(lora=None))
    adapted, merged = dict(model.named_parameters()), dict(plain.named_parameters())
    assert {name for name in adapted if ".lora." not in name} == set(merged)
    layers = [name.removesuffix(".lora.A") for name in adapted if name.endswith(".lora.A")]
    assert len(layers) == 2 * len(TARGETS)
    with torch.no_grad():
        for name, parameter in merged.items():
            assert torch.equal(parameter, adapted[name]), "the base depends on lora"
        for layer in layers:
            A, B = (adapted[f"{layer}.lora.{x}"] for x in "AB")
            weight = merged[f"{layer}.weight"]
            weight.copy_(weight.double() + addend(args, layer.rpartition(".")[2], A, B))
    inputs, targets = batch()
    logits, expected = model(inputs), plain(inputs)
    assert_close(logits, expected, FORWARD)
    cross_entropy(args)(logits, targets).backward()
    cross_entropy(args)(expected, targets).backward()
    assert {name for name, parameter in adapted.items() if parameter.grad is not None} == {
        f"{layer}.lora.{x}" for layer in layers for x in "AB"
    }
    for layer in layers:
        A, B = (adapted[f"{layer}.lora.{x}"] for x in "AB")
        wanted = gradients_by_hand(args, layer.rpartition(".")[2], A, B, merged[f"{layer}.weight"].grad)
        for parameter, gradient in zip((A, B), wanted, strict=True):
            assert gradient.abs().max() > 0
            assert_close(parameter.grad, gradient, GRADIENT, layer)


def test_at_first_nothing_changes_and_only_adapters_are_stepped():
    args = tiny_args(**WIDE_NON_DIVISIBLE, lora=dict(rank=2), weight_decay=0.1)
    model, plain = build_model(args), build_model(args.update(lora=None))
    inputs, _ = batch()
    assert torch.equal(model(inputs), plain(inputs))
    groups = get_params_for_weight_decay_optimization(model, args)
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in stepped}
    assert names == {
        f"sequential.{layer}.attention.{target}.lora.{x}"
        for layer in (2, 3)
        for target in ("query_key_value", "dense")
        for x in "AB"
    }
    bound = 80**-0.5  # as torch's Linear: Kaiming's uniform distribution of gain 1 / sqrt(3)
    A = model.sequential[2].attention.query_key_value.lora.A
    assert 0.9 * bound < A.abs().max() <= bound and abs(A.mean()) < 0.1 * bound


def test_dropout_acts_on_what_goes_into_adapters_and_in_training_only():
    linear = build_model(tiny_args(**MHA, lora=dict(rank=48, dropout=0.25))).sequential[2].attention.dense
    with torch.no_grad():
        linear.lora.A.copy_(torch.eye(48))
        linear.lora.B.zero_()[:48].copy_(torch.eye(48))
        ones = torch.ones(1000, 1, 48)
        kept = linear.lora.train()(ones)[..., :48]
        assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        assert abs((kept == 0).float().mean() - 0.25) < 0.01
        assert torch.equal(linear.lora.eval()(ones)[..., :48], ones)


REFUSED = {
    "rank is not set": dict(alpha=1.0),
    "rank=0 must be a positive whole number": dict(rank=0),
    "rank=True must be": dict(rank=True),
    "rank=2.0 must be": dict(rank=2.0),
    "alpha=0 must be a number greater than 0": dict(rank=2, alpha=0),
    "alpha='1' must be": dict(rank=2, alpha="1"),
    "dropout=1 must be a number from 0": dict(rank=2, dropout=1),
    "targets='dense' must be a list": dict(rank=2, targets="dense"),
    r"targets=\[\] must be a list": dict(rank=2, targets=[]),
    "q_proj is query_key_value here, or a part of it": dict(rank=2, targets=["q_proj"]),
    "'lm_head' is none of": dict(rank=2, targets=["lm_head"]),
    "aplha is none of rank, alpha, dropout, targets; did you mean alpha": dict(rank=2, aplha=3),
}


@pytest.mark.parametrize("complaint", REFUSED)
def test_settings_that_are_refused(complaint):
    with pytest.raises(ConfigError, match=f"lora=.*{complaint}"):
        tiny_args(lora=REFUSED[complaint])


def test_settings_that_do_not_go_together():
    with pytest.raises(ConfigError, match="lora=8 must be a mapping"):
        tiny_args(lora=8)
    with pytest.raises(ConfigError, match="log_head_diagnostics=5 measures the gradients of weights that lora freezes"):
        tiny_args(lora=dict(rank=2), log_head_diagnostics=5)
    for name in ("te_columnparallel", "te_rowparallel"):
        with pytest.raises(ConfigError, match=f"lora: {name}=True leaves projections to Transformer Engine"):
            tiny_args(lora=dict(rank=2), **{name: True})


def saved(folder, variant, lora=ALL):
    """A checkpoint with random adapters at one rank; returns its settings."""
    settings = settings_of(variant, lora=lora)
    write_checkpoint(folder, random_layers(NeoXArgs.from_dict(settings)), settings)
    return settings


def logits_of(folder):
    """Of a checkpoint by its own configs, joined at one rank; computed in fp64, to see the weights' rounding alone."""
    reader = CheckpointReader(checkpoint_folder(str(folder)))
    args = inference_args(reader, model_parallel_size=1, length=16)
    model = build_model(args).eval()
    load_weights_from(args, model, reader.folder)
    with torch.no_grad():
        return model.double()(batch()[0])[..., :128]  # the vocabulary is padded for more ranks


def resharded(source, out, ranks):
    assert reshard.main([str(source), str(out), f"--model-parallel-size={ranks}", "--pipe-parallel-size=1"]) == 0
    return out


def merged(source, out):
    assert merge_lora.main(["--input_dir", str(source), "--output_dir", str(out)]) == 0
    return out


SPLIT = {
    "mha gpt_j": 2,
    "gqa gated rms": 4,
    "gqa qk rms tied": 2,
    "gqa shared kv": 4,
    "mqa shared kv, uneven": 2,
    "kv heads by layer, full_width": 2,
    "mqa progressive gpt_j": 2,
    "gqa groups, full_width": 2,
    "mha keys are values": 2,
    "gqa groups, keys are values": 4,
}
"""Variants whose weights are split in different ways, and over how many ranks."""


@pytest.mark.parametrize("variant", SPLIT)
def test_split_joined_and_merged_it_is_the_same_function(variant, tmp_path):
    saved(tmp_path / "one", variant, lora={**ALL, "alpha": 1.0})
    expected = logits_of(tmp_path / "one")
    many = resharded(tmp_path / "one", tmp_path / "many", SPLIT[variant])
    back = resharded(many, tmp_path / "back", 1)
    first, last = (read_all(CheckpointReader(checkpoint_folder(str(path)))) for path in (tmp_path / "one", back))
    assert first.keys() == last.keys() and all(torch.equal(first[key], last[key]) for key in first)
    plain = read_all(CheckpointReader(checkpoint_folder(str(merged(many, tmp_path / "merged")))))
    assert not any(".lora." in name for _, _, name in plain)
    assert_close(logits_of(tmp_path / "merged").float(), expected.float(), FORWARD, variant)
    weight = (0, 2, "attention.dense.weight")
    one = resharded(tmp_path / "merged", tmp_path / "merged one", 1)
    moved = read_all(CheckpointReader(checkpoint_folder(str(one))))[weight] - first[weight]
    assert moved.abs().max() > 1e-3, "the adapters are too small to be seen"


def test_loading_what_does_not_fit(tmp_path):
    settings = saved(tmp_path / "adapted", "gqa gated rms")
    base = {key: value for key, value in settings.items() if key != "lora"}
    write_checkpoint(tmp_path / "base", random_layers(NeoXArgs.from_dict(base)), base)

    def load(folder, lora, **changes):
        args = NeoXArgs.from_dict({**base, "lora": lora, **changes})
        load_weights_from(args, build_model(args), checkpoint_folder(str(tmp_path / folder)))

    load("adapted", ALL)
    load("base", ALL, finetune=True)
    with pytest.raises(CheckpointError, match="it has no adapters; set finetune=true"):
        load("base", ALL)
    with pytest.raises(
        CheckpointError, match="it has adapters.*set lora as in its configs/, or merge them.*merge_lora"
    ):
        load("adapted", None)
    with pytest.raises(CheckpointError, match="lora.A: shape .* in the checkpoint"):
        load("adapted", {**ALL, "rank": 2})
    with pytest.raises(CheckpointError, match="linear2.lora.A: in the checkpoint, but this model has no such"):
        load("adapted", {**ALL, "targets": ["query_key_value", "dense", "linear1"]})
    write_stamp(NeoXArgs.from_dict(settings), checkpoint_folder(str(tmp_path / "adapted")))
    load("adapted", {**ALL, "dropout": 0.5})
    with pytest.raises(CheckpointError, match="lora.alpha: 7.5 in the checkpoint, 3.0 in the config"):
        load("adapted", {**ALL, "alpha": None})


def test_a_fresh_start_leaves_the_base_as_it_is(tmp_path, capsys):
    base = settings_of("gqa gated rms")
    layers = random_layers(NeoXArgs.from_dict(base))
    write_checkpoint(tmp_path, layers, base)
    args = NeoXArgs.from_dict({**base, "lora": ALL, "finetune": True})
    model = build_model(args)
    load_weights_from(args, model, checkpoint_folder(str(tmp_path)))
    assert "they have no adapters (lora): those of this run start afresh" in capsys.readouterr().out
    for name, parameter in model.named_parameters():
        _, index, rest = name.split(".", 2)
        if ".lora." not in name:
            assert torch.equal(parameter, layers[int(index)][rest]), name
        elif name.endswith(".B"):
            assert not parameter.any(), name


def test_a_stage_without_adapters_is_refused():
    args = tiny_args(lora=dict(rank=2), num_layers=4, pipe_parallel_size=4, pipe_partition_method="uniform")
    with pytest.raises(ConfigError, match="pipe_partition_method=uniform: a pipeline stage gets no transformer layer"):
        setup_model_and_optimizer(args)


def test_tools_say_what_to_do(tmp_path, capsys):
    saved(tmp_path / "adapted", "gqa gated rms")
    base = settings_of("gqa gated rms")
    write_checkpoint(tmp_path / "base", random_layers(NeoXArgs.from_dict(base)), base)
    with pytest.raises(ConversionError, match="has adapters.*merge_lora.*export_lora"):
        export_hf(str(tmp_path / "adapted"), str(tmp_path / "hf"), progress=False)
    adapted, out = str(tmp_path / "adapted"), str(tmp_path / "out")
    text = tmp_path / "text.txt"
    text.write_text("a text")
    for main, arguments in (
        (grow_head_dim.main, [adapted, out, "--head-dim=32"]),
        (convert_te.main, [adapted, out, "--to=te", "--mha"]),
        (head_dim.main, ["inspect", adapted, "--text", str(text), "--out", out]),
    ):
        assert main(arguments) != 0
        assert "has adapters (lora); merge them first: python tools/ckpts/merge_lora.py" in capsys.readouterr().err
    for tool in (merge_lora, export_lora):
        assert tool.main(["--input_dir", str(tmp_path / "base"), "--output_dir", str(tmp_path / "out")]) == 1
        assert "has no adapters; name a checkpoint of a run with lora" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "hf").exists()
