"""What a user gets wrong ends with one clear error, exit code 1 and nothing damaged."""

import pytest

from tests.e2e.programs import ROOT, deepy, run, write_config

BEFORE_A_PROCESS_STARTS = {
    "an unknown key": (dict(hiden_dropout=0.1), "hidden_dropout"),
    "a head_dim in quotes": (dict(head_dim="12"), "head_dim='12'"),
    "an impossible split": (dict(model_parallel_size=4), "num_attention_heads=6"),
    "a refused feature": (dict(use_mup=True), "use_mup"),
}


def _fails(workplace, script, *configs):
    finished = run(workplace, ROOT / "deepy.py", ROOT / script, *configs)
    output = finished.stdout + finished.stderr
    assert finished.returncode == 1, output[-3000:]
    assert output.count("error:") == 1, output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    return output[output.index("error:") :]


@pytest.mark.parametrize("case", BEFORE_A_PROCESS_STARTS)
def test_a_config_that_cannot_work(workplace, case):
    changes, named = BEFORE_A_PROCESS_STARTS[case]
    model = dict(yaml_of(workplace))
    model.update(changes)
    write_config(workplace, "wrong.yml", **model)
    assert named in _fails(workplace, "train.py", "wrong.yml")


def test_a_config_file_that_is_missing(workplace):
    assert "modle.yml" in _fails(workplace, "train.py", "modle.yml")


def test_data_that_are_missing_or_cut_short(workplace):
    model = dict(yaml_of(workplace), data_path="data/nowhere/text_document")
    write_config(workplace, "nowhere.yml", **model)
    assert "data/nowhere/text_document" in _fails(workplace, "train.py", "nowhere.yml")

    source = workplace / "data/pydocs/pydocs_text_document"
    (workplace / "cut.idx").write_bytes(source.with_suffix(".idx").read_bytes())
    (workplace / "cut.bin").write_bytes(source.with_suffix(".bin").read_bytes()[:-1000])
    write_config(workplace, "cut.yml", **dict(model, data_path="cut"))
    assert "cut.bin" in _fails(workplace, "train.py", "cut.yml")


def test_a_checkpoint_of_another_geometry(workplace):
    write_config(workplace, "own.yml", save="runs/own", load="runs/own", checkpoint_factor=5, exit_interval=5)
    deepy(workplace, "train.py", "model.yml", "own.yml")
    before = {path: path.read_bytes() for path in (workplace / "runs/own").rglob("*") if path.is_file()}
    swapped = dict(yaml_of(workplace), num_attention_heads=12, num_kv_heads=4, head_dim=6)
    write_config(workplace, "swapped.yml", **swapped)
    output = _fails(workplace, "train.py", "swapped.yml", "own.yml")
    assert "head_dim" in output and "num_attention_heads" in output
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path} was changed"


def yaml_of(workplace):
    """The settings of model.yml."""
    import yaml

    return yaml.safe_load((workplace / "model.yml").read_text())
