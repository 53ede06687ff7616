"""The patch as such on real checkouts: complete, applied once, taken back, and the same however the code is written."""

import ast
import os
import shutil
import subprocess

import pytest

from tests.neox_patch import checkouts
from tools.neox_patch import command
from tools.neox_patch.changes import whole_patch
from tools.neox_patch.plan import make_plan


def test_a_patched_checkout_has_nothing_left_to_change(tried, new):
    again = make_plan(new, whole_patch())
    assert again.complete and not again.told
    assert again.skipped == tried.plan.skipped
    assert len(tried.plan.told) > 10 * len(tried.plan.done)  # newer states have a repair or two already


def files_of(folder):
    """{path: bytes} of all files but git's own and what Python or the record of the patch left."""
    found = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__", ".head_dim_patch")]
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, folder)] = file.read()
    return found


@pytest.fixture
def repository_of(plain, tmp_path):
    """Function: a copy of the state as a repository with one commit, at a path with a space."""

    def make(name):
        folder = tmp_path / name
        shutil.copytree(plain, folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        options = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "core.autocrlf=false"]
        for arguments in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "-m", "as it is"]):
            subprocess.run(["git", *options, *arguments], cwd=folder, check=True)
        return folder

    return make


def test_the_diff_can_be_given_to_git(tried, new, repository_of):
    checkout = repository_of("a checkout")
    subprocess.run(["git", "apply", "-"], cwd=checkout, input=tried.plan.diff().encode(), check=True)
    assert files_of(checkout) == files_of(new)


def test_the_command_writes_checks_and_takes_back(new, repository_of):
    checkout = repository_of("a checkout")
    original = files_of(checkout)
    assert command.main([str(checkout), "--write"]) == command.DONE
    assert files_of(checkout) == files_of(new)
    assert command.main([str(checkout), "--check"]) == command.DONE
    assert command.main([str(checkout), "--revert"]) == command.DONE
    assert files_of(checkout) == original
    status = subprocess.run(["git", "status", "--porcelain", "--ignored"], cwd=checkout, capture_output=True, text=True)
    assert status.stdout == ""


class Renamed(ast.NodeTransformer):
    """Other names for the arguments object and for some locals."""

    NAMES = {
        "neox_args": "config",
        "world_size": "ranks",
        "coeff": "factor",
        "hidden_states": "stream",
        "query_layer": "queries",
        "key_layer": "keys",
    }

    def visit_Name(self, node):
        node.id = self.NAMES.get(node.id, node.id)
        return node

    def visit_arg(self, node):
        node.arg = self.NAMES.get(node.arg, node.arg)
        return node


def respelled(text):
    """Python in another formatting, without comments, under other names."""
    return ast.unparse(Renamed().visit(ast.parse(text))) + "\n"


def test_the_patch_is_the_same_however_the_code_is_written(tried, plain, new, tmp_path):
    """The patched spelling is the spelling of the patched file."""
    shutil.copytree(plain, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    python = [path for path, before in tried.plan.before.items() if before is not None and path.endswith(".py")]
    for path in python:
        (tmp_path / "copy" / path).write_text(respelled((plain / path).read_text()))
    patched = checkouts.patched(tmp_path / "copy")
    assert len(python) >= 7
    for path in python:
        assert respelled((patched / path).read_text()) == respelled((new / path).read_text()), path
