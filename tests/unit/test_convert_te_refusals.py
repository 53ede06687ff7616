"""What tools/ckpts/convert_te.py refuses, what a kill leaves, and what a load in the other form says."""

import json
import multiprocessing
import os
import signal

import pytest
import torch

from megatron.checkpointing import folders
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.te_names import as_native, conversion_hints, form_of
from megatron.checkpointing.weights import load_weights_from
from megatron.errors import CheckpointError
from megatron.model.gpt2_model import build_model
from tests.helpers.configs import tiny_values
from tests.helpers.geometries import GQA_TP4, MHA_TP4
from tests.helpers.resharding import random_layers, write_checkpoint
from tests.helpers.te_conversion import (
    BUT_MHA,
    RMS,
    TANH,
    convert,
    in_one_process,
    native_checkpoint,
    reshard_to,
    settings_of,
)
from tools.ckpts import convert_te


def refusal(capsys, source, out, to, *more):
    """The tool's message; it must have left the folder as it was."""
    before = sorted(os.listdir(out)) if os.path.isdir(out) else None
    assert convert_te.main([str(source), str(out), "--to", to, *map(str, more)]) == 1
    assert (sorted(os.listdir(out)) if os.path.isdir(out) else None) == before
    return capsys.readouterr().err


PER_HEAD = dict(**GQA_TP4, **RMS, **TANH, qk_norm_type="per_head")
ERF_GELU = dict(**MHA_TP4, bias_gelu_fusion=False)
NOT_HELD = {
    "qk_norm_type=per_head: te_mha=True has no norm on queries": (PER_HEAD, ()),
    "pos_emb=alibi": (dict(**MHA_TP4, **TANH, pos_emb="alibi"), ["--mha"]),
    "activation=gelu: Transformer Engine's gelu is the tanh form": (ERF_GELU, ["--layernorm-mlp"]),
    "Transformer Engine has layernorm and rmsnorm only": (dict(**MHA_TP4, norm="scalenorm"), ["--norms"]),
    "a joint norm on queries and keys": (dict(**MHA_TP4, use_qk_layernorm=True), ["--norms"]),
}


@pytest.mark.parametrize("message", NOT_HELD)
def test_what_transformer_engine_cannot_hold(message, tmp_path, capsys):
    values, parts = NOT_HELD[message]
    settings = {**settings_of("mha"), **tiny_values(**values), "attention_config": None}
    write_checkpoint(tmp_path / "in", random_layers(in_one_process(settings)), settings)
    told = refusal(capsys, tmp_path / "in", tmp_path / "out", "te", *parts)
    assert message in told and "name the others: --mha --layernorm-mlp --norms --linears" in told


def test_shared_heads_the_other_direction_and_nothing_to_do(tmp_path, capsys):
    name = "narrow zero-centred"
    native_checkpoint(name, tmp_path / "native")
    reshard_to(4, tmp_path / "native", tmp_path / "four")
    told = refusal(capsys, tmp_path / "four", tmp_path / "out", "te")
    assert "num_kv_heads=2 does not divide by model_parallel_size=4: te_mha=True cannot share" in told
    assert "it is native already" in refusal(capsys, tmp_path / "native", tmp_path / "out", "native")
    convert(tmp_path / "four", tmp_path / "te", "te", *BUT_MHA)
    told = refusal(capsys, tmp_path / "te", tmp_path / "out", "te", "--norms")
    assert "it is Transformer Engine's already" in told and "te_layernorm_mlp: true, norm: te_layernorm" in told
    assert "exists and is not empty" in refusal(capsys, tmp_path / "native", tmp_path / "four", "te")
    wanted = tmp_path / "wanted.yml"
    wanted.write_text(json.dumps({**settings_of(name), "te_mha": True, "attention_config": None}))
    told = refusal(capsys, tmp_path / "te", tmp_path / "out", "te", "--config", wanted)
    assert "te_layernorm_mlp=False" in told and "the other direction" in told


STRAY = {
    "mlp.fc1_weight": 2 * 66,  # GPT-NeoX's width
    "attention.qkv.weight": 3,
    "mlp.linear1.weight": 88,
    "attention.stray": 1,
}


def test_weights_that_fit_no_form(tmp_path, capsys):
    native_checkpoint("gqa gated rms", tmp_path / "native")
    reader = convert(tmp_path / "native", tmp_path / "te", "te")
    path = os.path.join(reader.folder, "layer_03-model_00-model_states.pt")
    state = torch.load(path)
    told = {}
    for name, rows in STRAY.items():
        torch.save({**state, name: torch.zeros(rows, 88)}, path)
        told[name] = refusal(capsys, tmp_path / "te", tmp_path / "out", "native")
    assert "layer 3, rank 0: mlp.fc1_weight has 132 rows on a rank, and 88 by the config" in told["mlp.fc1_weight"]
    assert "ffn_hidden_size instead, which is 66 times the number of ranks" in told["mlp.fc1_weight"]
    assert "attention.qkv.weight has 3 rows on a rank, and 200 by the config" in told["attention.qkv.weight"]
    assert "some are not, in one part: layernorm_mlp" in told["mlp.linear1.weight"]
    assert "attention.stray: not a parameter" in told["attention.stray"]
    twice = {"mlp.layer_norm_weight": torch.ones(2), "post_attention_layernorm.scale": torch.ones(2)}
    for state in (twice, dict(reversed(twice.items()))):
        with pytest.raises(CheckpointError, match="post_attention_layernorm.scale is there twice"):
            as_native(state, share=None, is_rms=True)


def _killed_at_layer_3(source, out):
    from megatron.checkpointing import reshard as writer

    save = writer.save_file

    def save_or_die(contents, path):
        if "layer_03" in path:
            os.kill(os.getpid(), signal.SIGKILL)
        save(contents, path)

    writer.save_file = save_or_die
    convert_te.main([source, out, "--to", "te"])


def test_a_kill_leaves_nothing_that_loads(tmp_path):
    native_checkpoint("mha", tmp_path / "native")
    out, context = str(tmp_path / "te"), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preload"])
    process = context.Process(target=_killed_at_layer_3, args=(str(tmp_path / "native"), out), daemon=True)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert os.listdir(out) == [".saving_global_step5"] and folders.find_checkpoint(out) is None
    assert form_of(convert(tmp_path / "native", out, "te").layer_state(3)) == (True, True, True)
    assert sorted(os.listdir(out)) == ["global_step5", "latest"]


def test_a_load_in_the_other_form_names_the_tool(tmp_path):
    native_checkpoint("mha", tmp_path / "native")
    reader = convert(tmp_path / "native", tmp_path / "te", "te", "--mha", "--norms")
    args = in_one_process({**settings_of("mha"), "attention_config": None})
    with pytest.raises(CheckpointError) as error:
        load_weights_from(args, build_model(args), reader.folder)
    told = str(error.value)
    assert "mha, norms: Transformer Engine's in the checkpoint and not in this model; set te_mha, norm as" in told
    assert "convert_te.py IN OUT --to native --mha --norms" in told
    names = [reader.layer_state(2), CheckpointReader(str(tmp_path / "native" / "global_step5")).layer_state(2)]
    assert "--to te --mha --norms" in conversion_hints(names[1], names[0])[0]
    assert conversion_hints(names[0], names[0]) == []
    assert conversion_hints({**names[0], **names[1]}, names[0]) == [], "mixed: the names themselves are reported"
