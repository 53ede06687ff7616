"""A Python file that is edited where the syntax tree says, and left alone everywhere else.

libcst finds constructs; edits are spans of the text, so that formatting and comments outside of them stay as they are,
byte for byte. An edit that would write what is there already (the same code, however it is formatted) is no edit, so
applying a change twice changes nothing.
"""

import ast
import textwrap
import warnings
from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple, Union

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

_STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


class AnchorNotFound(Exception):
    """A construct that a change needs is not in the file. The message says what was looked for, and where."""


class EditRefused(ValueError):
    """Edits that cannot be made together, or that leave no Python behind."""


@dataclass(frozen=True)
class Edit:
    """The bytes [start, end) become `text`."""

    start: int
    end: int
    text: str


class Source:
    """One file of the checkout: its tree, and the edits asked for so far.

    Raises AnchorNotFound if the text is not Python.
    """

    def __init__(self, path: str, text: str):
        self.path = path
        self.text = text
        try:
            module = cst.parse_module(text)
        except cst.ParserSyntaxError as error:
            raise AnchorNotFound(f"{path} is not Python that can be parsed (line {error.raw_line})") from None
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = wrapper.module
        self._spans = wrapper.resolve(ByteSpanPositionProvider)
        self._parents = _parents(self.module)
        self._bytes = text.encode()
        self._edits: List[Edit] = []

    def span(self, node: cst.CSTNode) -> Tuple[int, int]:
        """Byte offsets of a node, without the comments and blank lines before it, but with its decorators."""
        span = self._spans[node]
        decorators = getattr(node, "decorators", ())
        start = self._spans[decorators[0]].start if decorators else span.start
        return start, span.start + span.length

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node as it is written."""
        start, end = self.span(node)
        return self._bytes[start:end].decode()

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """The node around a node."""
        return self._parents[node]

    def statement(self, node: cst.CSTNode) -> Union[cst.SimpleStatementLine, cst.BaseCompoundStatement]:
        """The statement line, or the compound statement, that a node is in.

        Raises AnchorNotFound for a statement on the line of its `if` or `for`: it has no line of its own to edit.
        """
        start = node
        while not isinstance(node, _STATEMENTS):
            if isinstance(node, cst.SimpleStatementSuite):
                raise AnchorNotFound(f"{self.path}: {self.code(start)!r} on a line of its own, not behind a colon")
            node = self._parents[node]
        return node

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Put `text` in the place of an expression or of a simple statement. Parts that need it are indented here."""
        if not same_code(self.code(node), text):
            self._edits.append(Edit(*self.span(node), self._indented(text, node, first_line=False)))

    def replace_statement(self, statement: cst.CSTNode, text: str) -> None:
        """Put the statements of `text` in the place of one statement, whose own comments above it stay."""
        self._check_alone(statement)
        start, end = self.span(statement)
        end = self._without_newline(start, end)
        if not same_code(textwrap.dedent(self._line_start(start) + self._bytes[start:end].decode()), text):
            self._edits.append(Edit(start, end, self._indented(text, statement, first_line=False)))

    def remove_statement(self, statement: cst.CSTNode, with_comments: bool = False) -> None:
        """Take a statement away with its line end; comments and blank lines above it stay, or go with it."""
        self._check_alone(statement)
        start, end = self.span(statement)
        end = self._without_newline(start, end)
        above = statement.leading_lines if with_comments else ()
        line = self._bytes.rfind(b"\n", 0, self.span(above[0])[0] if above else start) + 1
        newline = self._bytes.find(b"\n", end)
        self._edits.append(Edit(line, len(self._bytes) if newline < 0 else newline + 1, ""))

    def move_out(self, last: cst.CSTNode) -> None:
        """Let the last statement of a block follow the statement that the block belongs to."""
        self._check_alone(last)
        start, _ = self.span(last)
        self._edits.append(
            Edit(start - len(self._line_start(start).encode()), start, self.indentation(self._parents[last]))
        )

    def insert_after(self, statement: cst.CSTNode, text: str) -> None:
        """Put the statements of `text` after a statement of the same block, unless they follow it already."""
        if same_statements(self._siblings(statement, +1), text):
            return
        start, end = self.span(statement)
        end = self._without_newline(start, end)
        newline = self._bytes.find(b"\n", end)
        end = len(self._bytes) if newline < 0 else newline  # a comment behind the statement stays with it
        self._edits.append(Edit(end, end, "\n" + self._indented(text, statement, first_line=True)))

    def insert_before(self, statement: cst.CSTNode, text: str) -> None:
        """Put the statements of `text` right before a statement (below comments above it), unless they are there."""
        if same_statements(self._siblings(statement, -1), text, at_end=True):
            return
        start, _ = self.span(statement)
        line = self._bytes.rfind(b"\n", 0, start) + 1
        self._edits.append(Edit(line, line, self._indented(text, statement, first_line=True) + "\n"))

    def insert_text(self, position: int, text: str) -> None:
        """Put `text` at a byte position. The caller sees to it that nothing of the kind is there."""
        self._edits.append(Edit(position, position, text))

    def begins_line(self, node: cst.CSTNode) -> bool:
        """Whether only white space is before a node on its line."""
        start, _ = self.span(node)
        return not self.line_before(start).strip()

    def line_before(self, position: int) -> str:
        """What is on the line before a byte position."""
        return self._bytes[self._bytes.rfind(b"\n", 0, position) + 1 : position].decode()

    def line_after(self, position: int) -> str:
        """What is on the line behind a byte position, without its end."""
        return self._bytes[position:].split(b"\n", 1)[0].decode()

    @property
    def changed(self) -> bool:
        """Whether any edit has been asked for."""
        return bool(self._edits)

    def result(self) -> str:
        """The text with all edits made. Raises EditRefused if two of them overlap or it is no longer Python."""
        pieces, position = [], 0
        for edit in sorted(self._edits, key=lambda edit: (edit.start, edit.end)):
            if edit.start < position:
                raise EditRefused(f"{self.path}: two edits overlap at byte {edit.start}: {edit.text!r}")
            pieces += [self._bytes[position : edit.start], edit.text.encode()]
            position = edit.end
        text = b"".join([*pieces, self._bytes[position:]]).decode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those about GPT-NeoX's own code are not the user's business here
                compile(text, self.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise EditRefused(f"{self.path}: the edited file is not Python: {error}") from None
        return text

    def indentation(self, node: cst.CSTNode) -> str:
        """The white space before the statement that a node is in."""
        while not isinstance(node, _STATEMENTS):
            node = self._parents[node]
        return self._line_start(self.span(node)[0])

    def _line_start(self, start: int) -> str:
        line = self._bytes[self._bytes.rfind(b"\n", 0, start) + 1 : start].decode()
        return line[: len(line) - len(line.lstrip())]

    def _indented(self, text: str, node: cst.CSTNode, first_line: bool) -> str:
        lines = textwrap.dedent(text).strip("\n").split("\n")
        space = self.indentation(node)
        indented = [space + line if line.strip() else "" for line in lines]
        return "\n".join(indented if first_line else [lines[0], *indented[1:]])

    def _without_newline(self, start: int, end: int) -> int:
        return start + len(self._bytes[start:end].rstrip())

    def _check_in_block(self, statement: cst.CSTNode) -> None:
        """An `elif` is part of the `if` before it: nothing can be put before it, or in its place."""
        if not isinstance(self._parents[statement], (cst.IndentedBlock, cst.Module)):
            raise AnchorNotFound(f"{self.path}: {self.code(statement)!r} as a statement of its own")

    def _check_alone(self, statement: cst.CSTNode) -> None:
        """Editing a whole line must not touch what else is on it."""
        self._check_in_block(statement)
        if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) > 1:
            raise AnchorNotFound(f"{self.path}: {self.code(statement)!r} as two lines, not one")

    def _siblings(self, statement: cst.CSTNode, direction: int) -> List[str]:
        self._check_in_block(statement)
        body: Sequence[cst.CSTNode] = self._parents[statement].body
        place = next(number for number, other in enumerate(body) if other is statement)
        nodes = body[place + 1 :] if direction > 0 else body[:place]
        dedented = []
        for node in nodes:
            start, end = self.span(node)
            dedented.append(textwrap.dedent(self._line_start(start) + self._bytes[start:end].decode()))
        return dedented


def _parents(module: cst.Module) -> Dict[cst.CSTNode, cst.CSTNode]:
    """Node -> node around it; the provider of libcst takes three times as long."""
    parents: Dict[cst.CSTNode, cst.CSTNode] = {}
    waiting: List[cst.CSTNode] = [module]
    while waiting:
        node = waiting.pop()
        for child in node.children:
            parents[child] = node
            waiting.append(child)
    return parents


def same_code(one: str, other: str) -> bool:
    """Whether two pieces of Python are the same apart from formatting and comments."""
    return _tree(one) == _tree(other)


def same_statements(statements: Sequence[str], text: str, at_end: bool = False) -> bool:
    """Whether `statements` begin (or end) with the statements of `text`."""
    count = len(ast.parse(textwrap.dedent(text)).body)
    chosen = statements[-count:] if at_end else statements[:count]
    return same_code("\n".join(chosen), text)


def _tree(code: str) -> str:
    """The syntax tree, written down. An expression may lack the brackets that it has where it stands."""
    code = textwrap.dedent(code).strip()
    try:
        return ast.dump(ast.parse(f"({code}\n)", mode="eval").body)
    except SyntaxError:
        return ast.dump(ast.parse(code))
