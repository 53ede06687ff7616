"""Edits of a Python file by its syntax tree: what is written, what is left alone, and what is refused."""

import ast

import libcst as cst
import pytest

from tools.neox_patch import build, find
from tools.neox_patch.source import AnchorNotFound, EditRefused, Source, same_code
from tools.neox_patch.text import editable, in_style_of, lines_of

PLAIN = '''"""A module."""
import os

@cached
@named("ä")  # ünïcode
def area(width, height):  # of a room
    # first the width
    size = width * height  # square metres

    if size > 10:
        kind = "große"  # ≥ 10
    elif size: kind = "kleine"
    else:
        kind = None; empty = True
    return call(
        size,
        kind=kind,  # as above
    )
'''


def edited(text, edit):
    """The text after an edit, after checking that the same edit then asks for nothing."""
    source = Source("room.py", text)
    edit(source)
    result = source.result()
    again = Source("room.py", result)
    edit(again)
    assert not again.changed, "asked for twice, an edit is made once"
    return result


def assignment(source, target):
    return find.assignment_to(source.module, source, target, "the module")


def replaced(old, new, text=PLAIN):
    """The truth: a plain text replacement of something that occurs once."""
    assert text.count(old) == 1
    return text.replace(old, new)


def test_an_expression_is_replaced_and_nothing_else():
    def edit(source):
        source.replace(assignment(source, "size").value, "height * width")

    assert edited(PLAIN, edit) == replaced("width * height", "height * width")


def test_offsets_count_bytes_of_unicode_text():
    def edit(source):
        found = [node for node in find.assignments_to(source.module, source, "kind") if "große" in source.code(node)]
        if found:
            source.replace(found[0].value, '"größte"')

    assert edited(PLAIN, edit) == replaced("große", "größte")


def test_a_statement_is_replaced_by_several_and_its_comments_stay():
    def edit(source):
        for node in find.assignments_to(source.module, source, "size"):
            if source.code(node.value) == "width * height":
                source.replace_statement(source.statement(node), "rows = width\nsize = rows * (\n    height\n)")

    new = "    rows = width\n    size = rows * (\n        height\n    )  # square metres\n"
    assert edited(PLAIN, edit) == replaced("    size = width * height  # square metres\n", new)


@pytest.mark.parametrize(
    "written", ["size = width*height", "size = (width *\n        height)", "size = width * height # other"]
)
def test_the_same_code_in_another_format_is_no_edit(written):
    source = Source("room.py", replaced("size = width * height", written))
    node = assignment(source, "size")
    source.replace_statement(source.statement(node), "size = width * height")
    source.replace(node.value, "width * height")
    source.replace(node, "size = width * height")
    assert not source.changed


def test_an_unbracketed_expression_over_two_lines_is_compared():
    source = Source("room.py", "x = f(\n    a\n    + b,\n    a\n    .c,\n)\n")
    first, second = source.module.body[0].body[0].value.args
    source.replace(first.value, "a + b")
    source.replace(second.value, "a.c")
    assert not source.changed
    source.replace(first.value, "a - b")
    assert source.result() == "x = f(\n    a - b,\n    a\n    .c,\n)\n"


def test_statements_are_put_after_one_behind_its_comment():
    def edit(source):
        source.insert_after(source.statement(assignment(source, "size")), "half = size / 2")

    assert edited(PLAIN, edit) == replaced("# square metres\n", "# square metres\n    half = size / 2\n")


def test_statements_are_put_before_one_below_its_comments():
    def edit(source):
        source.insert_before(source.statement(assignment(source, "size")), "check(width)\nif width:\n    check(height)")

    new = "    check(width)\n    if width:\n        check(height)\n    size ="
    assert edited(PLAIN, edit) == replaced("    size =", new)


def test_before_a_decorated_function_is_before_its_decorators():
    def edit(source):
        source.insert_before(find.function_named(source, "area"), "LIMIT = 3")

    assert edited(PLAIN, edit) == replaced("@cached\n", "LIMIT = 3\n@cached\n")


def test_after_a_block_is_behind_all_of_it():
    def edit(source):
        source.insert_after(source.statement(find.only(source, "if", find.every(source.module, cst.If)[:1])), "done()")

    assert edited(PLAIN, edit) == replaced("empty = True\n", "empty = True\n    done()\n")


def test_a_statement_is_removed_with_its_line_and_comments_above_it_stay():
    source = Source("room.py", PLAIN)
    source.remove_statement(source.statement(assignment(source, "size")))
    assert source.result() == replaced("    size = width * height  # square metres\n", "")


def test_the_last_line_may_have_no_end():
    def edit(source):
        source.insert_after(source.statement(assignment(source, "x")), "y = 2")

    assert edited("x = 1", edit) == "x = 1\ny = 2"
    source = Source("room.py", "y = 2\nx = 1")
    source.remove_statement(source.statement(assignment(source, "x")))
    assert source.result() == "y = 2\n"


@pytest.mark.parametrize("indent", ["  ", "\t", "        "])
def test_the_indentation_of_the_place_is_used(indent):
    text = f"class A:\n{indent}def f(self):\n{indent * 2}self.x = 1  # x\n{indent * 2}return self.x\n"

    def edit(source):
        source.insert_after(source.statement(find.assignments_to(source.module, source, "self.x")[0]), NESTED)
        source.insert_before(source.statement(find.every(source.module, cst.Return)[0]), NESTED)

    values = {}
    exec(edited(text, edit), values)
    assert values["A"]().f() == 2


NESTED = "if self.x == 1:\n    self.x = 2\nelse:\n    self.x = (\n        2)"


def test_nested_blocks_get_the_indentation_of_their_block():
    text = "for a in b:\n    with c:\n        try:\n            d = 1\n        finally:\n            e = 2\n"

    def edit(source):
        source.insert_after(source.statement(assignment(source, "d")), "f = 3")
        source.insert_before(source.statement(assignment(source, "e")), "g = 4")

    new = text.replace("d = 1\n", "d = 1\n            f = 3\n")
    assert edited(text, edit) == new.replace("            e = 2", "            g = 4\n            e = 2")


def test_what_has_no_line_of_its_own_is_not_edited_as_a_line():
    source = Source("room.py", PLAIN)
    kinds = find.assignments_to(source.module, source, "kind")
    with pytest.raises(AnchorNotFound, match=r"room.py: 'kind = \"kleine\"' on a line of its own"):
        source.statement(kinds[1])
    line = source.statement(kinds[2])
    for edit in (lambda: source.replace_statement(line, "kind = 1"), lambda: source.remove_statement(line)):
        with pytest.raises(AnchorNotFound, match="as two lines, not one"):
            edit()
    otherwise = find.every(source.module, cst.If)[1]
    for edit in (source.insert_after, source.insert_before, source.replace_statement):
        with pytest.raises(AnchorNotFound, match="as a statement of its own"):
            edit(otherwise, "x = 1")
    assert not source.changed


def test_an_expression_on_the_line_of_its_if_is_replaced_in_place():
    def edit(source):
        source.replace(find.assignments_to(source.module, source, "kind")[1].value, '"tiny"')

    assert edited(PLAIN, edit) == replaced('"kleine"', '"tiny"')


def test_edits_that_overlap_or_leave_no_python_are_refused():
    source = Source("room.py", PLAIN)
    node = assignment(source, "size")
    source.replace(node.value, "1")
    source.replace(node, "size = 2")
    with pytest.raises(EditRefused, match="room.py: two edits overlap"):
        source.result()
    source = Source("room.py", "if a:\n    b = 1\n")
    source.remove_statement(source.statement(assignment(source, "b")))
    with pytest.raises(EditRefused, match="room.py: the edited file is not Python"):
        source.result()


def test_edits_at_one_place_keep_their_order():
    source = Source("room.py", "x = 1\n")
    source.insert_after(source.module.body[0], "y = 2")
    source.insert_after(source.module.body[0], "z = 3")
    assert source.result() == "x = 1\ny = 2\nz = 3\n"


def test_text_that_is_not_python():
    with pytest.raises(AnchorNotFound, match="room.py is not Python that can be parsed .line 2"):
        Source("room.py", "x = 1\nprint 'x'\n")


def test_same_code():
    assert same_code("f(a,\n  b)  # c", "f(a, b)") and same_code("'a'", '"a"') and same_code("a\n+b", "a + b")
    assert not same_code("f(a, b)", "f(b, a)") and not same_code("x = 1", "x == 1")


# finders


def no_config_name(source):
    find.config_name(source, find.method(source, "A", "f"))


def test_what_is_missing_is_named_with_its_file():
    source = Source("room.py", PLAIN + "\nclass A:\n    def f(self): pass\n    x = 1\n    x = 2\n")
    whole = source.module
    for expected, look in (
        ("class B", lambda: find.class_named(source, "B")),
        ("def A.g", lambda: find.method(source, "A", "g")),
        ("def f", lambda: find.function_named(source, "f")),
        ("x = ... in A (2 of them, one was expected)", lambda: find.assignment_to(whole, source, "x", "A")),
        ("y = ... in A", lambda: find.assignment_to(whole, source, "y", "A")),
        ("open(...) in area", lambda: find.call_of(whole, source, "open", "area")),
        ("a / b in area", lambda: find.the_one_that_is(whole, source, "a / b", "area")),
        ("def f has no parameter for the arguments object", lambda: no_config_name(source)),
    ):
        with pytest.raises(AnchorNotFound) as error:
            look()
        assert str(error.value) == f"room.py: {expected}"
    call = find.call_of(source.module, source, "call", "area")
    with pytest.raises(AnchorNotFound, match="room.py: other=... in call"):
        find.keyword_value(source, call, "other", "call")
    assert source.code(find.keyword_value(source, call, "kind", "call")) == "kind"


@pytest.mark.parametrize("written", ["a.b(c)[0] + d", "(a.b( c )[0]\n  +d)", "a.b(c)[0] + (d)"])
def test_an_expression_is_found_in_any_format(written):
    source = Source("room.py", f"x = f({written}, a.b, 'a.b(c)[0] + d')\n")
    found = find.the_one_that_is(source.module, source, "a.b(c)[0] + d", "x")
    source.replace(found, "new")
    assert same_code(source.result(), "x = f(new, a.b, 'a.b(c)[0] + d')")
    assert len(find.where_is(source.module, source, "a.b")) == 2


# keywords and imports


@pytest.mark.parametrize(
    "before, after",
    [
        ("f(a)", "f(a, n=1)"),
        ("f(a, b=2)", "f(a, b=2, n=1)"),
        ("f(a, b=2,)", "f(a, b=2, n=1,)"),
        ("f(\n    a,\n    b=2,\n)", "f(\n    a,\n    b=2,\n    n=1,\n)"),
        ("f(\n    a,\n    b=2,  # two\n)", "f(\n    a,\n    b=2,  # two\n    n=1,\n)"),
        ("f(\n    a,\n    b=2)", "f(\n    a,\n    b=2,\n    n=1)"),
        ("f(a,\n  b=(2,\n     3))", "f(a,\n  b=(2,\n     3),\n  n=1)"),
        ("f(a, **more)", "f(a, **more, n=1)"),
        ("f(a, n=2)", "f(a, n=1)"),
        ("f(a, n= 1)", "f(a, n= 1)"),
    ],
)
def test_a_keyword_is_added_in_the_style_of_the_call(before, after):
    def edit(source):
        build.set_keyword(source, find.call_of(source.module, source, "f", "x"), "n", "1")

    assert edited(f"x = {before}\n", edit) == f"x = {after}\n"


def test_two_keywords_are_added_in_order():
    for before, after in (("f(a)", "f(a, n=1, m=2)"), ("f(\n  a,\n)", "f(\n  a,\n  n=1,\n  m=2,\n)")):
        source = Source("room.py", before)
        call = find.call_of(source.module, source, "f", "x")
        build.set_keyword(source, call, "n", "1")
        build.set_keyword(source, call, "m", "2")
        assert source.result() == after


def test_a_call_without_arguments_is_no_anchor():
    source = Source("room.py", "f()\n")
    with pytest.raises(AnchorNotFound, match=r"room.py: arguments of f\(\)"):
        build.set_keyword(source, find.call_of(source.module, source, "f", "x"), "n", "1")


def test_an_import_is_added_behind_those_of_megatron_at_the_top():
    text = '"""Doc."""\nimport os\nfrom megatron import a  # a\nimport sys\n\ndef f(): pass\n\nfrom megatron import b\n'

    def edit(source):
        build.add_import(source, "from megatron.geometry import G")

    line = "from megatron.geometry import G\n"
    assert edited(text, edit) == text.replace("# a\n", "# a\n" + line)
    assert edited("import os\nx = 1\n", edit) == "import os\n" + line + "x = 1\n"
    with pytest.raises(AnchorNotFound, match="an import at the top"):
        edit(Source("room.py", "x = 1\n"))


# line ends


def test_line_ends_and_byte_order_mark_come_back():
    exact = "\ufeffa = 1\r\nb = 2\r\n"
    assert editable(exact) == "a = 1\nb = 2\n"
    assert in_style_of(exact, "a = 1\nx = 3\nb = 2\n") == "\ufeffa = 1\r\nx = 3\r\nb = 2\r\n"
    assert in_style_of("a\nb\n", "a\nx\nb\n") == "a\nx\nb\n"


def test_in_a_file_with_both_line_ends_kept_lines_keep_theirs():
    exact = "a\r\nb\nc\r\nd\r\ne"
    assert in_style_of(exact, editable(exact)) == exact
    assert in_style_of(exact, "a\nb\nx\nd\ne\nf\n") == "a\r\nb\nx\r\nd\r\ne\r\nf\r\n"


def test_only_line_feeds_end_lines():
    text = "a\x0c\u2028b\r\nc\rd\n\ne"
    assert lines_of(text) == ["a\x0c\u2028b\r\n", "c\rd\n", "\n", "e"] and lines_of("") == []


def test_a_form_feed_is_white_space():
    def edit(source):
        source.insert_after(source.statement(assignment(source, "a")), "c = 3")

    result = edited("a = 1\n\x0c\nb = 2\n", edit)
    assert result == "a = 1\nc = 3\n\x0c\nb = 2\n" and ast.parse(result)
