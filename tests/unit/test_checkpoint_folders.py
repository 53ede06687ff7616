"""A save interrupted at any step leaves a complete checkpoint under a name that loads."""

import os
import shutil

import pytest

from megatron.checkpointing import folders
from megatron.checkpointing.folders import find_checkpoint, iterations_in, publish, recover, refuse_patterns, remove_old
from megatron.errors import CheckpointError


class Killed(BaseException):
    pass


def fill(root, iteration, content):
    """Stand-in for writing a checkpoint: two files that belong together."""
    folder = os.path.join(root, folders.saving_tag(iteration))
    os.makedirs(folder)
    for name in ("a.pt", "b.pt"):
        with open(os.path.join(folder, name), "w") as file:
            file.write(content)


def save(root, iteration, content):
    os.makedirs(root, exist_ok=True)
    recover(root)
    fill(root, iteration, content)
    publish(root, iteration)


def loaded(root, iteration=None):
    folder = find_checkpoint(root, iteration)
    if folder is None:
        return None
    texts = {open(os.path.join(folder, name)).read() for name in ("a.pt", "b.pt")}
    assert len(texts) == 1, "half of one checkpoint and half of another"
    return texts.pop()


def kill_at(monkeypatch, count):
    """Raise Killed before the count-th operation that changes the folder."""
    done = [0]

    def counted(function):
        def call(*args, **kwargs):
            done[0] += 1
            if done[0] == count:
                raise Killed
            return function(*args, **kwargs)

        return call

    for module, name in ((os, "rename"), (os, "replace"), (os, "remove"), (os, "rmdir"), (os, "unlink"), (os, "mkdir")):
        monkeypatch.setattr(module, name, counted(getattr(os, name)))
    return done


@pytest.mark.parametrize("iteration", [10, 20], ids=["overwrites", "new"])
def test_killed_at_every_step(tmp_path, monkeypatch, iteration):
    count, finished = 0, False
    while not finished:
        count += 1
        root = str(tmp_path / str(count))
        save(root, 5, "five")
        save(root, 10, "old")
        with monkeypatch.context() as patch:
            kill_at(patch, count)
            try:
                save(root, iteration, "new")
                remove_old(root, 1, iteration)
                finished = True
            except Killed:
                pass
        assert loaded(root) in ("old", "new")
        if iteration == 10:
            assert loaded(root, 10) in ("old", "new")
        save(root, 30, "later")
        assert loaded(root) == "later"
        hidden = [name for name in os.listdir(root) if name.startswith(".")]
        assert hidden == []
    assert count > 5, "the test did not interrupt anything"
    assert loaded(root, iteration) == "new"


def test_killed_in_the_first_save_of_all(tmp_path, monkeypatch):
    """Complete folder, no `latest` yet: it is used rather than starting from scratch."""
    root = str(tmp_path)
    fill(root, 7, "seven")
    monkeypatch.setattr(folders, "_write_latest", lambda *args: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        publish(root, 7)
    assert loaded(root) == "seven"


def test_unfinished_folder_is_not_found(tmp_path):
    fill(str(tmp_path), 7, "seven")
    assert find_checkpoint(str(tmp_path)) is None
    assert iterations_in(str(tmp_path)) == []


def test_nothing_there(tmp_path):
    assert find_checkpoint(str(tmp_path)) is None
    assert find_checkpoint(str(tmp_path / "no such folder")) is None
    with pytest.raises(CheckpointError, match="iteration=3.*iterations available: none"):
        find_checkpoint(str(tmp_path), 3)


def test_missing_iterations_name_those_there_are(tmp_path):
    for iteration in (2, 10, 9):
        save(str(tmp_path), iteration, "x")
    with pytest.raises(CheckpointError, match="iteration=3.*iterations available: 2, 9, 10"):
        find_checkpoint(str(tmp_path), 3)
    shutil.rmtree(tmp_path / "global_step9")
    with pytest.raises(CheckpointError, match="names global_step9.*available: 2, 10"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("tag", ["", "..", "../elsewhere", "a/b"])
def test_latest_must_name_a_folder_beside_it(tmp_path, tag):
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="latest"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "layer_00-model_00-model_states.pt"])
def test_a_checkpoint_given_in_place_of_its_parent(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(CheckpointError, match="is itself a checkpoint"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["run[1]", "run*", "what?"])
def test_names_that_deepspeed_would_not_find_again(name):
    refuse_patterns("save", "/data/run-1_a.b")
    with pytest.raises(CheckpointError, match="save="):
        refuse_patterns("save", f"/data/{name}")


def test_latest_is_written_as_gpt_neox_does(tmp_path):
    save(str(tmp_path), 12, "x")
    assert (tmp_path / "latest").read_bytes() == b"global_step12"


def test_remove_old_keeps_the_newest(tmp_path):
    root = str(tmp_path)
    for iteration in (100, 20, 3, 40):
        save(root, iteration, "x")
    (tmp_path / "global_step_notes").mkdir()
    assert remove_old(root, 2, newest=40) == [3, 20]
    assert iterations_in(root) == [40, 100]
    assert (tmp_path / "global_step_notes").is_dir()


@pytest.mark.parametrize("keep", [0, 1])
def test_the_one_just_saved_stays_even_beside_larger_numbers(tmp_path, keep):
    """A run started again in the folder of a longer one."""
    for iteration in (100, 20):
        save(str(tmp_path), iteration, "x")
    remove_old(str(tmp_path), keep, newest=20)
    assert iterations_in(str(tmp_path)) == [20]
    assert find_checkpoint(str(tmp_path)).endswith("global_step20")
