"""What patching a checkout would do, worked out in memory. Nothing is written here."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional

from rich.console import Console
from rich.progress import track

from tools.neox_patch.change import Change, Features, Patch, TextChange
from tools.neox_patch.source import AnchorNotFound, EditRefused, Source
from tools.neox_patch.text import editable, in_style_of, lines_of, read_exact


@dataclass
class Plan:
    """before, after: exact texts by path; before is None for files that will be added. Only what changes is in them.

    done: summaries of what the checkout has already. told: summaries of what will be done, with their paths.
    missing: what was not found, and where it was looked for. skipped: what this state of GPT-NeoX does not have.
    """

    before: Dict[str, Optional[str]] = field(default_factory=dict)
    after: Dict[str, str] = field(default_factory=dict)
    told: List[tuple] = field(default_factory=list)
    done: List[tuple] = field(default_factory=list)
    skipped: List[tuple] = field(default_factory=list)
    missing: List[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return not self.after and not self.missing

    def diff(self) -> str:
        """The whole change as one unified diff, as `git apply` takes it."""
        return "".join(_file_diff(path, self.before[path], self.after[path]) for path in sorted(self.after))


def make_plan(root: Path, patch: Patch, progress: bool = False) -> Plan:
    """Work out every change; those that cannot be made are listed in `missing`, all of them.

    progress: show a bar on standard error while files are read.
    """
    plan, features = Plan(), Features(root)
    by_path: Dict[str, List] = {}
    for change in [*patch.changes, *patch.texts]:
        if change.wanted is not None and not change.wanted(features):
            plan.skipped.append((change.path, change.summary))
        else:
            by_path.setdefault(change.path, []).append(change)
    console = Console(stderr=True)
    for path in track(list(by_path), "Reading", console=console, transient=True, disable=not progress):
        _plan_file(plan, features, path, by_path[path])
    for file in patch.files:
        if file.wanted is not None and not file.wanted(features):
            plan.skipped.append((file.path, file.summary))
        else:
            _plan_added(plan, features, file)
    return plan


def _plan_file(plan: Plan, features: Features, path: str, changes: List) -> None:
    file = features.root / path
    try:
        exact = read_exact(file, path) if file.is_file() else None
    except AnchorNotFound as error:
        plan.missing.append(str(error))
        return
    if not exact:
        plan.missing.append(f"{path}: no such file ({'; '.join(change.summary for change in changes)})")
        return
    editor = _Editor(path, editable(exact))
    for change in changes:
        before = editor.text
        try:
            editor.apply(change)
        except (AnchorNotFound, EditRefused) as error:
            plan.missing.append(f"{error} ({change.summary})")
            continue
        (plan.done if editor.text == before else plan.told).append((path, change.summary))
    after = in_style_of(exact, editor.text)
    if after != exact:
        plan.before[path], plan.after[path] = exact, after


class _Editor:
    """Applies changes one after the other; a tree that no change has outdated is not built again."""

    def __init__(self, path: str, text: str):
        self.path = path
        self.text = text
        self._source: Optional[Source] = None

    def apply(self, change) -> None:
        """Raises AnchorNotFound or EditRefused; the text is then as before."""
        if isinstance(change, TextChange):
            text = change.edit(self.text)
        else:
            assert isinstance(change, Change)
            source, self._source = self._source or Source(self.path, self.text), None
            change.edit(source)
            if not source.changed:
                self._source = source
                return
            text = source.result()
        if text != self.text:
            self.text, self._source = text, None


def _plan_added(plan: Plan, features: Features, file) -> None:
    content, place = file.content(), features.root / file.path
    if place.is_file() and editable(features.text(file.path)) == content:
        plan.done.append((file.path, file.summary))
    elif place.exists() or place.is_symlink():
        plan.missing.append(f"{file.path}: there is a file of that name already, with another content ({file.summary})")
    else:
        plan.told.append((file.path, file.summary))
        plan.before[file.path], plan.after[file.path] = None, content


def _file_diff(path: str, before: Optional[str], after: str) -> str:
    old = "/dev/null" if before is None else f"a/{path}"
    lines = difflib.unified_diff(lines_of(before or ""), lines_of(after), old, f"b/{path}")
    header = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if before is None else "")
    return header + "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )
