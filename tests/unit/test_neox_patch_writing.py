"""Writing a plan and taking it back: all or nothing, after errors and after a kill at any moment, to the byte."""

import os
import signal
import stat
from collections import Counter

import pytest

from megatron.errors import NeoXError
from tests.helpers.neox_patch_command import (
    AFTER,
    ARGS,
    BEFORE,
    MODEL,
    NEW,
    PAGE,
    make_checkout,
    patched,
    small_patch,
    snapshot,
    texts_of,
)
from tools.neox_patch import moving, record, writing
from tools.neox_patch.checkout import PatchError
from tools.neox_patch.plan import make_plan

CALLS = ("replace", "unlink", "rmdir", "open", "fsync", "mkdir")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write(root):
    writing.write(root, make_plan(root, small_patch()))


def revert(root):
    return writing.revert(root, record.load(root))


def interrupt(monkeypatch, number, action):
    """`action` instead of the n-th call that changes a folder, counted over all of them."""
    count = Counter()

    def wrapped(name, real):
        def call(*arguments, **options):
            if name == "open" and not (len(arguments) > 1 and isinstance(arguments[1], int) and arguments[1]):
                return real(*arguments, **options)
            count["calls"] += 1
            if count["calls"] == number:
                action(name)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, wrapped(name, getattr(os, name)))
    return count


def fail(name):
    raise OSError(28, f"No space left on device ({name})")


def test_written_and_taken_back(tmp_path):
    root = make_checkout(tmp_path)
    os.chmod(root / MODEL, 0o754)
    before = snapshot(root)
    write(root)
    assert texts_of(root) == patched()
    assert stat.S_IMODE((root / MODEL).stat().st_mode) == 0o754
    assert record.load(root).state == record.DONE and make_plan(root, small_patch()).complete
    kept = {".gitignore", "head_dim.diff", "record.json"}
    assert {file.name for file in (root / record.FOLDER).iterdir()} == kept
    for folder in ("megatron/head_dim", "megatron/model"):
        (root / folder / "__pycache__").mkdir()
    (root / "megatron/head_dim/__pycache__/config.cpython-311.pyc").write_bytes(b"")
    assert revert(root) == []
    (root / "megatron/model/__pycache__").rmdir()
    assert snapshot(root) == before


def files_of(root):
    return {path: text for path, text in texts_of(root).items() if not path.endswith(".head_dim_patch")}


def with_error_at(monkeypatch, number, action, root):
    """(whether there was such a moment, whether the action failed)"""
    with monkeypatch.context() as patched_os:
        count = interrupt(patched_os, number, fail)
        try:
            action(root)
        except OSError as error:
            assert "No space left" in str(error)
            return True, True
        return count["calls"] >= number, False


def test_after_an_error_at_any_moment_of_writing_all_is_as_it_was(tmp_path, monkeypatch):
    failures, there = 0, True
    for number in range(1, 200):
        root = make_checkout(tmp_path / str(number), git=False)
        before = snapshot(root)
        there, failed = with_error_at(monkeypatch, number, write, root)
        if not there:
            break
        failures += failed
        if failed:
            assert snapshot(root) == before, number
        else:  # an error that does not matter, as that of a folder that is there already
            assert texts_of(root) == patched()
    assert failures > 15 and not there


def test_after_an_error_at_any_moment_of_taking_back_all_is_as_it_was(tmp_path, monkeypatch):
    kept, there = 0, True
    for number in range(1, 200):
        root = make_checkout(tmp_path / str(number), git=False)
        write(root)
        there, failed = with_error_at(monkeypatch, number, revert, root)
        if not there:
            break
        if failed and texts_of(root) != BEFORE:
            kept += 1
            assert texts_of(root) == patched() and record.load(root).state == record.DONE, number
        if record.load(root) is not None:
            revert(root)
        assert texts_of(root) == BEFORE
    assert kept > 8 and not there


def test_an_error_that_lasts_is_mended_by_the_next_run(tmp_path, monkeypatch):
    """The disk fails from some moment on, so that nothing can be put back."""
    for number in range(1, 20):
        root = make_checkout(tmp_path / str(number), git=False)
        count, real = Counter(), os.replace

        def broken(*arguments, count=count, number=number, real=real):
            count["calls"] += 1
            if count["calls"] >= number:
                fail("replace")
            return real(*arguments)

        with monkeypatch.context() as patched_os:
            patched_os.setattr(os, "replace", broken)
            try:
                write(root)
                break
            except (OSError, NeoXError):
                pass
        if record.load(root) is not None:
            assert writing.is_interrupted(record.load(root))
            revert(root)
        assert texts_of(root) == BEFORE, number
    assert number > 8


@pytest.mark.parametrize("what", ["write", "revert"])
def test_after_a_kill_at_any_moment_the_next_run_puts_all_back(tmp_path, monkeypatch, what):
    for number in range(1, 200):
        root = make_checkout(tmp_path / str(number), git=False)
        before = snapshot(root)
        if what == "revert":
            write(root)
        child = os.fork()
        if child == 0:
            interrupt(monkeypatch, number, lambda name: os.kill(os.getpid(), signal.SIGKILL))
            try:
                (write if what == "write" else revert)(root)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        if record.load(root) is not None:
            assert writing.is_interrupted(record.load(root)) or files_of(root) == patched()
            revert(root)
        left = {path: value for path, value in snapshot(root).items() if not path.startswith(record.FOLDER)}
        assert left == before, number
        if number % 5 == 0:
            write(root)
            revert(root)
            assert snapshot(root) == before, number
    assert 10 < number < 199


def test_nothing_is_written_if_anything_is_missing(tmp_path):
    root = make_checkout(tmp_path, {**BEFORE, PAGE: "Nothing"}, git=False)
    before = snapshot(root)
    with pytest.raises(PatchError, match="heads in the list of arguments"):
        write(root)
    assert snapshot(root) == before


def test_a_file_changed_since_it_was_planned(tmp_path):
    root = make_checkout(tmp_path, git=False)
    plan = make_plan(root, small_patch())
    (root / PAGE).write_text("newer\n")
    before = snapshot(root)
    with pytest.raises(PatchError, match=f"{PAGE} was changed by something else just now"):
        writing.write(root, plan)
    assert snapshot(root) == before


def test_files_that_may_not_be_replaced(tmp_path):
    root = make_checkout(tmp_path / "root", git=False)
    (tmp_path / "elsewhere").mkdir()
    (root / MODEL).rename(tmp_path / "elsewhere/transformer.py")
    (root / MODEL).symlink_to(tmp_path / "elsewhere/transformer.py")
    os.chmod(root / ARGS, 0o444)
    (root / "tests").symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path)
    with pytest.raises(PatchError) as error:
        write(root)
    problems = error.value.problems
    assert len(problems) == 3 and f"{ARGS} is read-only" in problems[0]
    assert f"{MODEL} is, or is behind, a symbolic link to {tmp_path}/elsewhere/transformer.py" in problems[1]
    assert NEW[2] in problems[2] and snapshot(tmp_path) == before


def test_edits_made_since_are_kept(tmp_path):
    root = make_checkout(tmp_path, git=False)
    write(root)
    (root / MODEL).write_text(AFTER[MODEL] + "\n\nclass Mine:\n    pass\n")
    (root / "megatron/head_dim/mine.py").write_text("x = 1\n")
    assert revert(root) == [MODEL]
    expected = {**BEFORE, MODEL: BEFORE[MODEL] + "\n\nclass Mine:\n    pass\n", "megatron/head_dim/mine.py": "x = 1\n"}
    assert texts_of(root) == expected and record.load(root) is None


def test_edits_that_would_be_lost_stop_it(tmp_path):
    root = make_checkout(tmp_path, git=False)
    write(root)
    (root / MODEL).write_text(AFTER[MODEL].replace("config.size(args)", "config.size(args) * 2"))
    (root / NEW[1]).write_text("mine = 1\n")
    (root / ARGS).unlink()
    before = snapshot(root)
    with pytest.raises(PatchError) as error:
        revert(root)
    assert [problem.split(" ")[0] for problem in error.value.problems] == [ARGS, MODEL, NEW[1]]
    assert "removed since" in str(error.value) and "in lines of the patch" in str(error.value)
    assert snapshot(root) == before


def test_without_git_edits_are_not_merged(tmp_path, monkeypatch):
    root = make_checkout(tmp_path, git=False)
    write(root)
    (root / MODEL).write_text(AFTER[MODEL] + "x = 1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PatchError, match=f"{MODEL} was edited since"):
        revert(root)


def test_what_was_taken_back_by_other_means_is_no_edit(tmp_path):
    root = make_checkout(tmp_path, git=False)
    write(root)
    (root / MODEL).write_text(BEFORE[MODEL])
    (root / NEW[1]).unlink()
    assert revert(root) == [] and texts_of(root) == BEFORE


def test_the_record_of_other_files_is_kept_aside(tmp_path):
    root = make_checkout(tmp_path, git=False)
    write(root)
    for path in NEW:
        (root / path).unlink()
    other = {**BEFORE, ARGS: BEFORE[ARGS] + "    layers: int = 1\n"}
    make_checkout(root, other, git=False)
    write(root)
    assert (root / record.FOLDER / "record.1.json").is_file()
    revert(root)
    assert texts_of(root) == other and (root / record.FOLDER / "record.1.json").is_file()


def test_a_damaged_record(tmp_path):
    root = make_checkout(tmp_path, git=False)
    write(root)
    file = root / record.FOLDER / record.NAME
    whole = file.read_text()
    for text, expected in (
        (whole.replace("of the model", "of a model"), "is damaged .ValueError: a checksum differs"),
        (whole[:500], "is damaged"),
        (whole.replace('"format": 1', '"format": 2'), "has format 2: use the version of this tool that wrote it"),
    ):
        file.write_text(text)
        with pytest.raises(PatchError, match=expected):
            record.load(root)


def test_two_runs_at_once(tmp_path):
    root = make_checkout(tmp_path, git=False)
    plan = make_plan(root, small_patch())
    with writing._alone(root):
        with pytest.raises(PatchError, match="another run is writing"):
            writing.write(root, plan)
    assert texts_of(root) == BEFORE


def test_moves_go_both_ways(tmp_path):
    (tmp_path / "a").write_text("1")
    moving.move(tmp_path, {"a": ("1", None), "b/c": (None, "2")})
    assert not (tmp_path / "a").exists() and (tmp_path / "b/c").read_text() == "2"
