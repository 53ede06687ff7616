"""`python -m tools.neox_patch`: what it prints where, its exit statuses, and what it refuses."""

import ast
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.neox_patch_command import (
    AFTER,
    ARGS,
    BEFORE,
    ENTRY,
    MODEL,
    NEW,
    PAGE,
    commit,
    make_checkout,
    patched,
    run_git,
    small_patch,
    snapshot,
    texts_of,
)
from tools.neox_patch import command, explain, record, writing
from tools.neox_patch.changes import whole_patch


@pytest.fixture
def run(capsys):
    """The command with the small patch -> (exit status, standard output, standard error)."""

    def call(*arguments, patch=None):
        status = command.main([str(argument) for argument in arguments], patch or small_patch())
        return (status, *capsys.readouterr())

    return call


def refused(result, *expected):
    """A refusal: status 2, nothing on standard output, and these texts."""
    status, out, error = result
    assert status == 2 and not out and error.startswith("neox_patch: ")
    for text in expected:
        assert text in error


def test_showing_writes_nothing_and_the_diff_equals_writing(tmp_path, run):
    one, other = make_checkout(tmp_path / "a b"), make_checkout(tmp_path / "other")
    before = snapshot(one)
    status, diff, told = run(one)
    assert status == 0 and snapshot(one) == before
    assert diff.startswith("diff --git a/") and "\x1b" not in diff
    assert f"{one}: 3 files change, 3 are added" in told
    assert f"  {MODEL}\n    - the width of a head\n    - the width of the output\n" in told
    assert f"  {NEW[0]} (new): a new file" in told and "To review:" in told
    assert "Left out, as this state of GPT-NeoX lacks it:\n  megatron/model/te.py: the width for te" in told
    assert told.rstrip().endswith(f"Next:\n  python -m tools.neox_patch '{one}' --write")
    run_git(other, "apply", "-", input=diff.encode())
    status, out, told = run(one, "--write")
    assert status == 0 and not out
    assert texts_of(one) == texts_of(other) == patched()
    assert f"(cd '{one}' && python -m pytest {NEW[2]})" in told and "--revert" in told
    assert run_git(one, "status", "--porcelain", "--", record.FOLDER) == b"", "git ignores the record"


def test_write_check_revert_in_turn(tmp_path, run):
    root = make_checkout(tmp_path)
    before = snapshot(root)
    assert run(root, "--check") == (1, "not patched; it can be: --write\n", "")
    assert run(root, "--revert") == (0, "", f"{root} is not patched: nothing to take back\n")
    assert run(root, "--write")[0] == 0
    assert run(root, "--check") == (0, "patched\n", "")
    written = snapshot(root)
    for arguments in ((root,), (root, "--write")):
        assert run(*arguments) == (0, "", f"{root} is patched: nothing is left to change\n")
    assert snapshot(root) == written
    assert run(root, "--revert") == (0, "", "Taken back: 3 files as before, 3 removed.\n")
    assert snapshot(root) == before and run(root, "--check")[0] == 1


def test_the_tree_may_not_be_dirty(tmp_path, run):
    root = make_checkout(tmp_path)
    (root / "untracked").write_text("x")
    assert run(root)[0] == 0
    (root / ENTRY).write_text(BEFORE[ENTRY] + "# mine\n")
    (root / "README.md").unlink()
    before = snapshot(root)
    assert run(root)[0] == 0 and run(root, "--check")[0] == 1
    refused(run(root, "--write"), f"uncommitted changes in README.md, {ENTRY}: commit or stash", "--allow-dirty")
    assert snapshot(root) == before
    assert run(root, "--write", "--allow-dirty")[0] == 0
    assert run(root, "--revert")[0] == 0 and snapshot(root) == before


def test_staged_changes_are_dirty_and_other_repositories_are_not_asked(tmp_path, run, monkeypatch):
    root, other = make_checkout(tmp_path / "a"), make_checkout(tmp_path / "b", {**BEFORE, ENTRY: "# mine\n"})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.chdir(other)
    (root / ENTRY).write_text("# mine\n")
    run_git_here(root, "add", "-A")
    refused(run(os.path.relpath(root), "--write"), f"uncommitted changes in {ENTRY}:")


def run_git_here(root, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "GIT_DIR"}
    run_git(root, *arguments, env=environment)


def test_local_commits_worktrees_and_larger_repositories(tmp_path, run):
    main = make_checkout(tmp_path / "main")
    (main / MODEL).write_text("# mine\n" + BEFORE[MODEL].replace("self.rest", "self.other"))
    commit(main)
    run_git(main, "worktree", "add", "-q", tmp_path / "tree")
    assert run(tmp_path / "tree", "--write")[0] == 0
    assert (tmp_path / "tree" / MODEL).read_text() == "# mine\n" + AFTER[MODEL].replace("self.rest", "self.other")
    around = make_checkout(tmp_path / "around", {"x": "1"}, git=False)
    inner = make_checkout(around / "vendor/gpt-neox", git=False)
    make_checkout(around, {"y": "1"})
    (around / "y").write_text("2")
    assert run(inner, "--write")[0] == 0, "what is dirty elsewhere does not matter"
    assert run(inner, "--revert")[0] == 0 and run_git(around, "status", "--porcelain") == b" M y\n"


def test_a_folder_without_git(tmp_path, run):
    root = make_checkout(tmp_path, git=False)
    status, _, told = run(root, "--write")
    assert status == 0 and "Not under git" in told and "git -C" not in told and texts_of(root) == patched()


def test_git_that_cannot_answer(tmp_path, run, monkeypatch):
    root = make_checkout(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(run(root, "--write"), "there is no git command", "--allow-dirty")
    assert run(root, "--write", "--allow-dirty")[0] == 0
    assert run(root, "--revert")[0] == 0


def test_what_is_no_checkout(tmp_path, run):
    root = make_checkout(tmp_path / "root", git=False)
    refused(run(tmp_path / "none"), f"PATH={tmp_path}/none: no such folder")
    refused(run(root / "megatron"), "is inside of a GPT-NeoX checkout", f"give its root, {root}")
    (root / ENTRY).unlink()
    for option in ((), ("--check",), ("--write",), ("--revert",)):
        refused(run(root, *option), f"is no GPT-NeoX checkout: {ENTRY} not found in it")
    refused(run(record.PROJECT), "is this project, which has head_dim")


def test_a_link_to_a_checkout_is_followed(tmp_path, run):
    root = make_checkout(tmp_path / "root")
    (tmp_path / "link").symlink_to(root)
    assert run(tmp_path / "link", "--write")[0] == 0 and texts_of(root) == patched()


def test_a_head_dim_of_another_origin(tmp_path, run):
    root = make_checkout(tmp_path, {**BEFORE, ARGS: AFTER[ARGS]})
    before = snapshot(root)
    for option in ((), ("--check",), ("--write",)):
        refused(run(root, *option), f"NeoXArgsModel in {ARGS} has a head_dim already")
    assert snapshot(root) == before


def test_what_is_not_found_is_listed_and_nothing_written(tmp_path, run):
    root = make_checkout(tmp_path, {**BEFORE, MODEL: BEFORE[MODEL].replace("Linear", "Dense"), PAGE: "Nothing"})
    before = snapshot(root)
    missing = (f"{MODEL}: Linear(...) in __init__", f"{PAGE}: heads in the list of arguments")
    for option in ((), ("--write",)):
        refused(run(root, *option), *missing, "so nothing was written")
    status, out, error = run(root, "--check")
    assert status == 2 and out.startswith("cannot be patched: not found: ") and out.count("\n") == 1 and not error
    assert all(text in out for text in missing) and snapshot(root) == before


def test_partly_patched(tmp_path, run):
    root = make_checkout(tmp_path)
    run(root, "--write")
    (root / MODEL).write_text(BEFORE[MODEL])
    expected = f"partly patched ({MODEL} not): --revert first, then --write"
    assert run(root, "--check") == (1, expected + "\n", "")
    refused(run(root, "--write", "--allow-dirty"), expected)
    assert run(root, "--revert")[0] == 0 and texts_of(root) == BEFORE
    committed = make_checkout(tmp_path / "clone", {**patched(), MODEL: BEFORE[MODEL]})
    assert run(committed, "--check") == (1, f"partly patched ({MODEL} not): --write\n", "")
    assert run(committed, "--write")[0] == 0 and texts_of(committed) == patched()


def test_patched_by_another_version(tmp_path, run, monkeypatch):
    root = make_checkout(tmp_path / "root")
    run(root, "--write")
    (tmp_path / "newer.py").write_text("# newer\n")
    newer = small_patch(tmp_path / "newer.py")
    monkeypatch.setattr(record, "patch_version", lambda: "newer")
    expected = "patched by another version of this tool: --revert first, then --write"
    assert run(root, "--check", patch=newer) == (1, expected + "\n", "")
    assert run(root, "--check") == (0, "patched\n", ""), "another version that changes the same"
    refused(run(root, "--write", "--allow-dirty", patch=newer), expected)
    assert run(root, "--revert", patch=newer)[0] == 0
    assert run(root, "--write", patch=newer)[0] == 0 and (root / NEW[1]).read_text() == "# newer\n"


def test_the_version_is_that_of_all_the_patch(tmp_path, monkeypatch):
    before = record.patch_version()
    assert before == record.patch_version() and len(before) == 12
    (tmp_path / "x.py").write_text("1")
    monkeypatch.setattr(record, "PROJECT", tmp_path.parent)
    monkeypatch.setattr(record, "FILES", tmp_path)
    monkeypatch.setattr(record, "__file__", str(tmp_path / "record.py"))
    one = record.patch_version()
    (tmp_path / "x.py").write_text("2")
    assert len({before, one, record.patch_version()}) == 3


def test_a_patch_without_a_record(tmp_path, run):
    root = make_checkout(tmp_path, patched())
    assert run(root, "--check")[0] == 0
    refused(run(root, "--revert"), "git revert COMMIT", "git checkout -- FILE")


def test_an_interrupted_run(tmp_path, run, monkeypatch):
    root = make_checkout(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(writing, "_put_back", lambda *arguments: None)
        broken.setattr(os, "replace", stop_at(MODEL, os.replace))
        broken.setattr(writing.moving, "content", lambda file: BEFORE.get(file.relative_to(root).as_posix()))
        refused(run(root, "--write"), "stopped")
    assert texts_of(root)[ARGS] == AFTER[ARGS] and texts_of(root)[MODEL] == BEFORE[MODEL]
    assert run(root, "--check") == (1, explain.INTERRUPTED + "\n", "")
    refused(run(root), explain.INTERRUPTED)
    status, _, told = run(root, "--write")
    assert status == 0 and told.startswith("An earlier run was interrupted; what it did was taken back.\n")
    assert texts_of(root) == patched()


def stop_at(path, real):
    def replace(source, target):
        if str(target).endswith(path):
            raise OSError("stopped")
        return real(source, target)

    return replace


def test_edits_made_since_are_told(tmp_path, run):
    root = make_checkout(tmp_path)
    run(root, "--write")
    (root / MODEL).write_text(AFTER[MODEL] + "\n\nx = 1\n")
    status, _, told = run(root, "--revert")
    assert status == 0 and f"{MODEL} keeps what was edited since" in told
    assert texts_of(root) == {**BEFORE, MODEL: BEFORE[MODEL] + "\n\nx = 1\n"}


def test_on_a_terminal_the_diff_is_coloured(tmp_path):
    root = make_checkout(tmp_path)
    for options, coloured in (([], True), (["--no-color"], False)):
        mine, its = pty.openpty()
        child = start("-c", PROGRAM, root, *options, stdout=its)
        os.close(its)
        text = read_all(mine)
        child.communicate()
        os.close(mine)
        assert child.returncode == 0 and ("\x1b[32m" in text) == coloured and "head_dim: int = None" in text


def start(*arguments, **options):
    """Python, in the folder of this project."""
    options = {"stderr": subprocess.PIPE, "text": True, "cwd": record.PROJECT, **options}
    return subprocess.Popen([sys.executable, *arguments], **options)


def finished(*arguments, **options):
    """(exit status, standard output, standard error)"""
    child = start(*arguments, **{"stdout": subprocess.PIPE, **options})
    texts = child.communicate()
    return (child.returncode, *texts)


PROGRAM = """
import os, sys
os.environ["TERM"] = "xterm-256color"
os.environ.pop("NO_COLOR", None)
from tests.helpers.neox_patch_command import small_patch
from tools.neox_patch.command import main
sys.exit(main(sys.argv[1:], small_patch()))
"""


def read_all(descriptor):
    pieces = []
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # how Linux ends a terminal
            break
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces).decode()


def test_as_a_program_without_torch_and_with_a_reader_that_leaves(tmp_path):
    root = make_checkout(tmp_path)
    program = PROGRAM.replace("sys.exit(", "code = (") + "assert 'torch' not in sys.modules; sys.exit(code)"
    reader, writer = os.pipe()
    os.close(reader)
    status, _, told = finished("-c", program, root, stdout=writer)
    os.close(writer)
    assert status == 0 and "Traceback" not in told and "Next:" in told
    status, out, _ = finished("-m", "tools.neox_patch", "--help")
    assert status == 0 and "--revert" in out
    refused(finished("-m", "tools.neox_patch", tmp_path / "x"), "PATH=")


def test_without_libcst_it_says_what_to_install():
    program = "import runpy, sys; sys.modules['libcst'] = None; runpy.run_module('tools.neox_patch', None, '__main__')"
    refused(finished("-c", program, "x"), "requirements/requirements-patch.txt")


def test_the_whole_patch_names_each_file_once():
    patch = whole_patch()
    added = [file.path for file in patch.files]
    changed = {change.path for change in [*patch.changes, *patch.texts]}
    assert len(set(added)) == len(added) and not changed & set(added)
    for file in patch.files:
        assert file.content(), file.path
        if file.path.endswith(".py"):
            compile(file.content(), file.path, "exec", dont_inherit=True)


def test_its_requirements_file_is_all_that_it_needs():
    """Who only patches a checkout installs nothing else."""
    root = Path(__file__).resolve().parents[2]
    named = re.findall(r"^\w+", (root / "requirements/requirements-patch.txt").read_text(), re.MULTILINE)
    code = [*(root / "tools/neox_patch").glob("*.py"), *(root / "tools/neox_patch/changes").glob("*.py")]
    code += [root / "megatron" / name for name in ("__init__.py", "errors.py", "geometry.py")]
    imported = set()
    for node in (node for path in code for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names - {"tools", "megatron"} == set(named)
