"""What patching a checkout would do, worked out in memory. Nothing is written here."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional

from tools.neox_patch.change import Change, Features, Patch, TextChange
from tools.neox_patch.source import AnchorNotFound, Source


@dataclass
class Plan:
    """before, after: texts by path; before is None for files that will be added. Only what changes is in them.

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


def make_plan(root: Path, patch: Patch) -> Plan:
    """Work out every change; those that cannot be made are listed in `missing`, all of them."""
    plan, features = Plan(), Features(root)
    by_path: Dict[str, List] = {}
    for change in [*patch.changes, *patch.texts]:
        if change.wanted is not None and not change.wanted(features):
            plan.skipped.append((change.path, change.summary))
        else:
            by_path.setdefault(change.path, []).append(change)
    for path, changes in by_path.items():
        _plan_file(plan, features, path, changes)
    for file in patch.files:
        if file.wanted is not None and not file.wanted(features):
            plan.skipped.append((file.path, file.summary))
        else:
            _plan_added(plan, features, file)
    return plan


def _plan_file(plan: Plan, features: Features, path: str, changes: List) -> None:
    before = text = features.text(path)
    if not text:
        plan.missing.append(f"{path}: no such file ({'; '.join(change.summary for change in changes)})")
        return
    for change in changes:
        try:
            changed = _apply(change, text)
        except AnchorNotFound as error:
            plan.missing.append(f"{error} ({change.summary})")
            continue
        (plan.done if changed == text else plan.told).append((path, change.summary))
        text = changed
    if text != before:
        plan.before[path], plan.after[path] = before, text


def _apply(change, text: str) -> str:
    if isinstance(change, TextChange):
        return change.edit(text)
    assert isinstance(change, Change)
    source = Source(change.path, text)
    change.edit(source)
    return source.result() if source.changed else text


def _plan_added(plan: Plan, features: Features, file) -> None:
    content, present = file.content(), features.text(file.path)
    if present == content:
        plan.done.append((file.path, file.summary))
    elif (features.root / file.path).exists():
        plan.missing.append(f"{file.path}: there is a file of that name already, with another content ({file.summary})")
    else:
        plan.told.append((file.path, file.summary))
        plan.before[file.path], plan.after[file.path] = None, content


def _file_diff(path: str, before: Optional[str], after: str) -> str:
    old = "/dev/null" if before is None else f"a/{path}"
    lines = difflib.unified_diff(_lines(before or ""), _lines(after), old, f"b/{path}")
    header = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if before is None else "")
    return header + "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> List[str]:
    return text.splitlines(keepends=True)
