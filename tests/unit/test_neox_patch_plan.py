"""What patching a checkout would do: texts, summaries, what is missing, and the diff."""

import pytest

from tests.helpers.neox_patch_command import (
    AFTER,
    ARGS,
    BEFORE,
    MODEL,
    NEW,
    PAGE,
    make_checkout,
    patched,
    run_git,
    small_patch,
    texts_of,
)
from tools.neox_patch.plan import make_plan


def test_plan_of_a_plain_checkout(tmp_path):
    root = make_checkout(tmp_path, git=False)
    plan = make_plan(root, small_patch())
    assert plan.after == AFTER and plan.before == {path: BEFORE.get(path) for path in AFTER}
    assert plan.told == [
        (ARGS, "the argument head_dim"),
        (MODEL, "the width of a head"),
        (MODEL, "the width of the output"),
        (PAGE, "the page of arguments"),
        *[(path, "a new file") for path in NEW],
    ]
    assert plan.skipped == [("megatron/model/te.py", "the width for te")]
    assert not plan.done and not plan.missing and not plan.complete
    assert texts_of(root) == BEFORE, "nothing is written"


def test_plan_of_a_patched_checkout_is_empty(tmp_path):
    plan = make_plan(make_checkout(tmp_path, patched(), git=False), small_patch())
    assert plan.complete and not plan.after and not plan.told and len(plan.done) == 7 and plan.diff() == ""


def test_plan_of_a_half_patched_checkout_is_the_rest(tmp_path):
    texts = {**BEFORE, ARGS: AFTER[ARGS], NEW[1]: AFTER[NEW[1]]}
    plan = make_plan(make_checkout(tmp_path, texts, git=False), small_patch())
    assert {path for path, _ in plan.done} == {ARGS, NEW[1]}
    assert plan.after == {path: AFTER[path] for path in (MODEL, PAGE, NEW[0], NEW[2])}


def test_all_that_is_missing_is_listed(tmp_path):
    texts = {
        **BEFORE,
        MODEL: BEFORE[MODEL].replace("self.size =", "self.width =").replace("Linear", "Dense"),
        PAGE: "Nothing",
        NEW[1]: "# another\n",
    }
    del texts[ARGS]
    plan = make_plan(make_checkout(tmp_path, texts, git=False), small_patch())
    assert plan.missing == [
        f"{ARGS}: no such file (the argument head_dim)",
        f"{MODEL}: self.size = ... in ParallelSelfAttention.__init__ (the width of a head)",
        f"{MODEL}: Linear(...) in __init__ (the width of the output)",
        f"{PAGE}: heads in the list of arguments (the page of arguments)",
        f"{NEW[1]}: there is a file of that name already, with another content (a new file)",
    ]
    assert not plan.complete


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"latin" + b"\xe4\n", f"{MODEL} is not UTF-8 text (byte 5)"),
        (b"class A(:\n", f"{MODEL} is not Python that can be parsed (line 1) (the width of a head)"),
        (b"", f"{MODEL}: no such file (the width of a head; the width of the output)"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, expected):
    plan = make_plan(make_checkout(tmp_path, {**BEFORE, MODEL: content}, git=False), small_patch())
    assert expected in plan.missing and MODEL not in plan.after


def test_an_edit_that_leaves_no_python_is_missing_not_a_crash(tmp_path):
    patch = small_patch()
    patch.changes[1:] = [type(patch.changes[0])(MODEL, "a break", lambda source: source.insert_text(0, "((("))]
    plan = make_plan(make_checkout(tmp_path, git=False), patch)
    assert len(plan.missing) == 1 and "the edited file is not Python" in plan.missing[0] and MODEL not in plan.after


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_byte_order_mark_are_kept_and_the_diff_can_be_applied(tmp_path, mark, end):
    def styled(text):
        return mark + text.replace("\n", end)

    before = {path: styled(text) for path, text in BEFORE.items()}
    root = make_checkout(tmp_path, before)
    plan = make_plan(root, small_patch())
    expected = {path: styled(AFTER[path]) for path in (ARGS, MODEL, PAGE)}
    assert {path: plan.after[path] for path in expected} == expected
    run_git(root, "apply", "--whitespace=nowarn", "-", input=plan.diff().encode())
    assert texts_of(root) == {**before, **plan.after}
    assert make_plan(root, small_patch()).complete


def test_an_added_file_with_other_line_ends_is_there_already(tmp_path):
    texts = {**patched(), NEW[0]: AFTER[NEW[0]].replace("\n", "\r\n")}
    assert make_plan(make_checkout(tmp_path, texts, git=False), small_patch()).complete


def test_a_tree_is_built_once_while_nothing_changes(tmp_path, monkeypatch):
    from tools.neox_patch import plan

    built = []
    monkeypatch.setattr(plan, "Source", lambda path, text, real=plan.Source: built.append(path) or real(path, text))
    make_plan(make_checkout(tmp_path, patched(), git=False), small_patch())
    assert built == [ARGS, MODEL]
