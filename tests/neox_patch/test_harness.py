"""The harness computes what GPT-NeoX computes: plain checkouts on golden weights give the golden logits and losses."""

import pytest
import torch
import yaml

from tests.golden import cases
from tests.helpers.tolerances import assert_close
from tests.neox_patch import checkouts

PLAIN_CASES = ("case1_pythia_mha", "case2_llama_gqa", "case3_mha_qk_layernorm")


@pytest.mark.parametrize("tp", [1, 2])
def test_plain_checkouts_give_the_golden_numbers(plain, state, tp, tmp_path):
    """Every state of GPT-NeoX, unpatched, against numbers that its newest state wrote in another process."""
    names = [name for name in PLAIN_CASES if name in (cases.TP1 if tp == 1 else cases.TP2)]
    if not checkouts.epsilon_is_under_the_root(plain):
        names.remove("case2_llama_gqa")
    runs = []
    for name in names:
        weights = tmp_path / name
        weights.mkdir()
        cases.write_checkpoint(name, tp, weights)
        runs += [_case(name, pp, weights) for pp in (0, 1)]
    results = checkouts.run_cases(plain, runs, tp=tp, folder=tmp_path)
    for name in names:
        for pp in (0, 1):
            logits, loss, _ = cases.expected(name, tp)
            for result in results[f"{name}_pp{pp}"]:
                assert "error" not in result, result["traceback"]
                assert_close(result["logits"][:, ::4], logits, what=f"{state} {name}")
                assert result["loss"] == pytest.approx(loss, abs=1e-5)
                assert all(torch.isfinite(gradient).all() for gradient in result["grads"].values())


def _case(name, pp, weights):
    values = yaml.safe_load((cases.DATA / name / "config.yml").read_text())
    values.update(pipe_parallel_size=pp, padded_vocab_size=cases.vocabulary(name))
    values.pop("vocab_file", None)
    inputs, labels = cases.tokens_and_labels(name)
    ids = torch.cat([inputs, labels[:, -1:]], dim=1)
    return checkouts.case(f"{name}_pp{pp}", values, ids, do=["backward"], weights=weights)
