"""A small checkout with the files that a GPT-NeoX checkout is known by, and a small patch for it."""

import subprocess
from pathlib import Path

from tools.neox_patch import build, find
from tools.neox_patch.change import FILES, AddedFile, Change, Patch, TextChange
from tools.neox_patch.source import AnchorNotFound

ARGS, ENTRY, MODEL, PAGE = (
    "megatron/neox_arguments/neox_args.py",
    "megatron/neox_arguments/arguments.py",
    "megatron/model/transformer.py",
    "configs/neox_arguments.md",
)
NEW = ("megatron/head_dim/__init__.py", "megatron/head_dim/config.py", "tests/head_dim/test_config.py")

BEFORE = {
    ARGS: '''from dataclasses import dataclass

@dataclass
class NeoXArgsModel:
    width: int = 8  # of the model
    """as in the paper – wide"""
    heads: int = 2
''',
    ENTRY: "def check(args):\n    return args.width > 0\n",
    MODEL: """from megatron import mpu

class ParallelSelfAttention:
  def __init__(self, args):
    # per head
    self.size = args.width//args.heads   # whole
    self.out = Linear(args.width)
    self.rest = [args.width,
                 args.heads]
""",
    PAGE: "# Arguments\n\n- **width**: int\n\n    of the model\n\n- **heads**: int",
    "README.md": "A model.\n",
}

AFTER = {
    ARGS: BEFORE[ARGS].replace(
        "    heads: int = 2\n", '    head_dim: int = None\n    """of a head, with te_mha too"""\n    heads: int = 2\n'
    ),
    MODEL: BEFORE[MODEL]
    .replace("import mpu\n", "import mpu\nfrom megatron.head_dim import config\n")
    .replace("args.width//args.heads ", "config.size(args) ")
    .replace("Linear(args.width)", "Linear(args.width, size=self.size)"),
    PAGE: BEFORE[PAGE] + "\n\n- **head_dim**: int\n",
    **{path: (FILES / "megatron/head_dim/config.py").read_text() for path in NEW},
}
"""What the patch makes of them, written by plain replacement."""


def _field(source):
    scope = find.class_named(source, "NeoXArgsModel")
    heads = [node for node in scope.body.body if source.code(node).startswith("heads:")]
    place = find.only(source, "heads in NeoXArgsModel", heads)
    source.insert_before(place, 'head_dim: int = None\n"""of a head, with te_mha too"""')


def _width(source):
    init = find.method(source, "ParallelSelfAttention", "__init__")
    node = find.assignment_to(init, source, "self.size", "ParallelSelfAttention.__init__")
    source.replace(node.value, f"config.size({find.config_name(source, init)})")
    build.add_import(source, "from megatron.head_dim import config")


def _output(source):
    init = find.method(source, "ParallelSelfAttention", "__init__")
    build.set_keyword(source, find.call_of(init, source, "Linear", "__init__"), "size", "self.size")


def _page(text):
    if "**heads**" not in text:
        raise AnchorNotFound(f"{PAGE}: heads in the list of arguments")
    return text if "**head_dim**" in text else text.rstrip("\n") + "\n\n- **head_dim**: int\n"


def small_patch(version=None):
    """The patch; its added files are all a copy of one. version: another text for them."""
    origin = version or FILES / "megatron/head_dim/config.py"
    return Patch(
        [
            Change(ARGS, "the argument head_dim", _field),
            Change(MODEL, "the width of a head", _width),
            Change(MODEL, "the width of the output", _output),
            Change("megatron/model/te.py", "the width for te", _width, wanted=lambda features: features.te_attention),
        ],
        [TextChange(PAGE, "the page of arguments", _page)],
        [AddedFile(path, "a new file", origin) for path in NEW],
    )


def make_checkout(root: Path, texts=None, git=True) -> Path:
    """Write the small checkout, by default into a git repository with one commit."""
    for path, text in (texts or BEFORE).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode() if isinstance(text, str) else text)
    if git:
        run_git(root, "init", "-q")
        run_git(root, "config", "core.autocrlf", "false")
        commit(root)
    return root


def commit(root: Path) -> None:
    """Commit all there is."""
    run_git(root, "add", "-A")
    run_git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "state")


def run_git(root: Path, *arguments, **options) -> str:
    """git, which must succeed."""
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, **options).stdout


def snapshot(root: Path) -> dict:
    """Every file and folder but git's own, with contents and modes."""
    return {
        path.relative_to(root).as_posix(): (path.stat().st_mode, path.read_bytes() if path.is_file() else None)
        for path in sorted(root.rglob("*"))
        if ".git" not in path.relative_to(root).parts
    }


def patched(texts=None) -> dict:
    """path -> text of the patched checkout."""
    return {**(texts or BEFORE), **AFTER}


def texts_of(root: Path) -> dict:
    """path -> text of a checkout, without the record and git's own files."""
    return {
        path: content[1].decode()
        for path, content in snapshot(root).items()
        if content[1] is not None and not path.startswith(".head_dim_patch/")
    }
