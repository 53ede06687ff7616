"""Published geometries, 32B among them, on the meta device: their shapes, ours and the tables' are the same."""

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron import costs
from megatron.checkpointing.shards import Shards
from megatron.convert.families import FAMILIES
from megatron.convert.neox_source import whole_on_meta
from megatron.convert.rules import write_out
from megatron.model.gpt2_model import GPT2ModelSequential
from megatron.neox_arguments import NeoXArgs

VOCAB = 151936
SIZES = {  # hidden, heads, kv heads, ffn, layers, tied, parameters
    "qwen3-0.6b": (1024, 16, 8, 3072, 28, True, 596_049_920),
    "qwen3-4b": (2560, 32, 8, 9728, 36, True, 4_022_468_096),
    "qwen3-32b": (5120, 64, 8, 25600, 64, False, 32_762_123_264),
}
D = 128


def config_of(name):
    hidden, heads, kv_heads, ffn, layers, tied, _ = SIZES[name]
    return transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        head_dim=D,
    )


def table_of(name, **changes):
    config = config_of(name)
    family = FAMILIES["qwen3"]
    settings = {**family.settings(config), "padded_vocab_size": VOCAB, "train_micro_batch_size_per_gpu": 1, **changes}
    args = NeoXArgs.from_dict({**settings, "global_num_gpus": changes.get("model_parallel_size", 1)})
    return args, write_out(family.rules(args), args, VOCAB)


@pytest.mark.parametrize("name", SIZES)
def test_shapes_are_the_seed_s(name):
    hidden, n, m, *_ = SIZES[name]
    _, lines = table_of(name)
    for number in (0, SIZES[name][4] - 1):
        shapes = {each: shape for line in lines for each, shape in zip(line.theirs, line.shapes, strict=True)}
        layer = f"model.layers.{number}.self_attn."
        assert shapes[f"{layer}q_proj.weight"] == (n * D, hidden)
        assert shapes[f"{layer}k_proj.weight"] == shapes[f"{layer}v_proj.weight"] == (m * D, hidden)
        assert shapes[f"{layer}o_proj.weight"] == (hidden, n * D)
    fused = next(line for line in lines if line.ours == "attention.query_key_value.weight")
    assert whole_on_meta(fused).shape == ((n + 2 * m) * D, hidden)


@pytest.mark.parametrize("name", SIZES)
def test_every_tensor_of_theirs_and_of_ours_is_in_the_table_once(name, monkeypatch):
    monkeypatch.setattr(GPT2ModelSequential, "to", lambda self, device: self)  # tensors without memory cannot be moved
    args, lines = table_of(name)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config_of(name))
    with FakeTensorMode():
        ours = GPT2ModelSequential(args)
    wanted = {each: tuple(parameter.shape) for each, parameter in theirs.named_parameters()}
    pairs = [pair for line in lines for pair in zip(line.theirs, line.shapes, strict=True)]
    assert len(pairs) == len(dict(pairs)) and dict(pairs) == wanted
    built = {each: tuple(parameter.shape) for each, parameter in ours.state_dict().items()}
    made = {f"sequential.{line.index}.{line.ours}": tuple(whole_on_meta(line).shape) for line in lines}
    assert made == built and len(lines) == len(made)
    total = SIZES[name][-1]
    assert sum(torch.Size(shape).numel() for shape in made.values()) == total == costs.num_parameters(args)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_32b_splits_as_the_model_is_built(ranks):
    args, lines = table_of("qwen3-32b", model_parallel_size=ranks)
    shards, (hidden, n, m, ffn, *_) = Shards(args), SIZES["qwen3-32b"]
    expected = {
        "attention.query_key_value.weight": ((n + 2 * m) * D // ranks, hidden),
        "attention.dense.weight": (hidden, n * D // ranks),
        "attention.q_layernorm.scale": (D,),
        "mlp.linear1.weight": (2 * ffn // ranks, hidden),
        "mlp.linear2.weight": (hidden, ffn // ranks),
        "input_layernorm.scale": (hidden,),
    }
    found = {line.ours: line for line in lines if line.index == 65}
    for name, shape in expected.items():
        pieces = shards.split(65, name, whole_on_meta(found[name]), ranks)
        assert [tuple(piece.shape) for piece in pieces] == [shape] * ranks
