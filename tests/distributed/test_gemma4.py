"""Gemma 4 over tensor-parallel ranks and pipeline stages: imported, trained, asked for tokens, exported: all as one
model of transformers', trained by torch's SGD."""

import os
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from tests.helpers.convert_folders import assert_same_tensors, raw_config, run_export, run_import
from tests.helpers.convert_models import VOCAB, function_keys, hf_model, save_hf, text, their_logits
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import LOSS, TRAJECTORY
from tests.parity.test_convert_gemma4 import config_of

HEADS = dict(hidden_size=80, num_attention_heads=4, num_key_value_heads=2, head_dim=12, final_logit_softcapping=9.0)
MODELS = {
    "keys are values": dict(HEADS, global_head_dim=40, num_global_key_value_heads=1, attention_k_eq_v=True),
    "as many keys": dict(
        HEADS,
        num_key_value_heads=4,
        global_head_dim=24,
        attention_k_eq_v=True,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
}
"""At 2 ranks the first shares the global layers' key head between them; the second interleaves q and k rows."""
LAYOUTS = {
    "tp2 pp0": dict(model_parallel_size=2, pipe_parallel_size=0),
    "tp2 pp1": dict(model_parallel_size=2, pipe_parallel_size=1, sequence_parallel=True, checkpoint_activations=True),
    "tp1 pp2": dict(model_parallel_size=1, pipe_parallel_size=2),
    "zero 3": dict(model_parallel_size=1, pipe_parallel_size=0, zero_optimization={"stage": 3}),
}
STEPS, RATE, NEW = 3, 0.005, 9
PROMPTS = [[5, 17, 99, 3], [64, 1, 80, 2], [7, 7, 110, 30]]


def _batch(step):
    return text(seed=20 + step)


def _generates(layout):
    """Sequences are not split in generation, and it needs whole weights."""
    return not {"sequence_parallel", "zero_optimization"} & set(LAYOUTS[layout])


def _run(rank, world_size, root, layouts):
    """By model and layout: losses of the steps, and what is generated after them, cached and not: tokens, logits."""
    from megatron import mpu
    from megatron.checkpointing import save_checkpoint
    from megatron.neox_arguments import NeoXArgs
    from megatron.text_generation import stream_tokens
    from megatron.training import train_step
    from tests.helpers.engines import build_engine

    found = {}
    for name in MODELS:
        for layout in layouts:
            run = dict(distributed_backend="gloo", use_cpu_initialization=True, global_num_gpus=world_size)
            replicas = 2 if layout == "zero 3" else 1
            run.update(
                train_micro_batch_size_per_gpu=2 // replicas,
                seq_length=text().shape[1] - 1,
                train_iters=STEPS,
                warmup=0,
            )
            run.update(optimizer={"type": "sgd", "params": {"lr": RATE}}, lr_decay_style="constant", weight_decay=0.0)
            run.update(gradient_clipping=0.0, min_lr=0.0, hidden_dropout=0.0, checkpoint_factor=STEPS)
            run.update(return_logits=True, save=os.path.join(root, f"{name} {layout} trained"), **LAYOUTS[layout])
            mpu.destroy_model_parallel()
            args = NeoXArgs.from_ymls([os.path.join(root, f"{name} {layout}", "model.yml")], run)
            args.tokenizer = SimpleNamespace(eod=0, vocab_size=VOCAB)
            engine = build_engine(args)
            engine.train()
            own = slice(rank % replicas, None, replicas)
            rows = [{"text": _batch(step)[own]} for step in range(STEPS)]
            losses = [train_step(args, engine, iter([each]))["loss"] for each in rows]
            save_checkpoint(args, STEPS, engine)
            generated = []
            for recompute in (False, True) if _generates(layout) else ():
                *_, state = stream_tokens(args, engine.module, PROMPTS, -1, maximum_tokens=NEW, recompute=recompute)
                generated.append((state.tokens[:, : len(PROMPTS[0]) + NEW].tolist(), state.logits.numpy()))
            found[name, layout] = [float(loss) for loss in losses], generated
    return found


def _train(hf):
    optimizer = torch.optim.SGD(hf.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        rows = _batch(step)
        logits = hf(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _generate(hf):
    """Tokens [rows, all] and the logits [new, rows, VOCAB] that the new ones come from."""
    tokens, seen = torch.tensor(PROMPTS), []
    for _ in range(NEW):
        seen.append(their_logits(hf, tokens)[:, -1])
        tokens = torch.cat([tokens, seen[-1].argmax(-1, keepdim=True)], 1)
    return tokens.tolist(), torch.stack(seen).numpy()


def test_trained_and_generated_as_transformers(tmp_path):
    hf, source = {}, {}
    for name, changes in MODELS.items():
        hf[name] = hf_model(config_of(**changes))
        source[name] = save_hf(hf[name], tmp_path / name)
        for layout, sizes in LAYOUTS.items():
            out = tmp_path / f"{name} {layout}"
            sizes = {key: sizes[key] for key in ("model_parallel_size", "pipe_parallel_size")}
            run_import(source[name], out, make_vocab_size_divisible_by=1, **sizes)
            back = run_export(out, tmp_path / "back" / out.name)
            assert_same_tensors(source[name], back)
            written = transformers.Gemma4TextConfig.from_dict(raw_config(back))
            assert function_keys(written) == function_keys(hf[name].config)
    ranks = run_distributed(2, _run, str(tmp_path), list(LAYOUTS), tmp_path=tmp_path)
    for name in MODELS:
        before, losses = their_logits(hf[name], text()), _train(hf[name])
        (tokens, steps), logits = _generate(hf[name].eval()), their_logits(hf[name], text())
        assert (logits - before).abs().max() > 0.1, "it was trained"
        for layout in LAYOUTS:
            for found in ranks:
                mine, generated = found[name, layout]
                assert np.abs(np.subtract(mine, losses)).max() <= LOSS, (name, layout)
                assert len(generated) == (2 if _generates(layout) else 0)
                for their_tokens, their_steps in generated:
                    assert their_tokens == tokens, (name, layout)
                    assert np.abs(their_steps - steps).max() <= TRAJECTORY, (name, layout)
            back = run_export(tmp_path / f"{name} {layout} trained", tmp_path / f"{name} {layout} back")
            again = transformers.AutoModelForCausalLM.from_pretrained(back, attn_implementation="eager").eval()
            assert (their_logits(again, text()) - logits).abs().max() <= TRAJECTORY, (name, layout)
