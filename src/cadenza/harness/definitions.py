"""Functions and classes of a Python file, found by name and replaced with every other byte left alone."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_BOM = "\ufeff"


class DefinitionRefused(ValueError):
    """A definition that cannot be put into a file. ``missing``: the file has no such name."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Definition:
    """One ``def`` or ``class``. Lines count from 1 and both ends are in; ``decorated`` is the first decorator's line,
    or ``first``. ``within``: names of what it lies in, outermost first."""

    name: str
    first: int
    last: int
    decorated: int
    indent: str
    within: tuple[str, ...]
    is_class: bool

    def text(self, source: str) -> str:
        """Its lines in the source it was found in, decorators left out."""
        return "\n".join(source.split("\n")[self.first - 1 : self.last])


def definitions(source: str) -> list[Definition]:
    """Every function and class, in the order of their first lines.

    Raises SyntaxError, or ValueError for what the parser gives up on (too deep, a null byte, a lone carriage return).
    """
    if "\r" in source:
        raise ValueError("carriage returns")
    lines = source.split("\n")
    found: list[Definition] = []
    try:
        pending: list[tuple[ast.AST, tuple[str, ...]]] = [(ast.parse(source), ())]
    except (RecursionError, MemoryError) as error:
        raise ValueError("too deep to parse") from error
    while pending:
        node, within = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Node):
                found.append(_definition(child, lines, within))
                pending.append((child, (*within, child.name)))
            else:
                pending.append((child, within))
    return sorted(found, key=lambda d: (d.first, d.last))


def _definition(node: Node, lines: list[str], within: tuple[str, ...]) -> Definition:
    decorated = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    if node.decorator_list:  # what the parser calls its line may come after the "@"
        while decorated > 1 and not lines[decorated - 1].lstrip().startswith("@"):
            decorated -= 1
    return Definition(
        node.name,
        node.lineno,
        node.end_lineno or node.lineno,
        decorated,
        _indent_of(lines[node.lineno - 1]),
        within,
        isinstance(node, ast.ClassDef),
    )


def _indent_of(line: str) -> str:
    line = line.lstrip("\f")
    return line[: len(line) - len(line.lstrip(" \t"))]


def innermost(source: str, line: int) -> Definition | None:
    """The innermost definition around a line; None outside any, or when the source does not parse."""
    try:
        around = [d for d in definitions(source) if d.decorated <= line <= d.last]
    except (SyntaxError, ValueError):
        return None
    return max(around, key=lambda d: d.first, default=None)


def replace_definition(data: bytes, text: str) -> bytes:
    """Puts a whole new definition in the place of the one of the same name and kind in ``data``.

    The text's ``def`` or ``class`` line names what is replaced; where several have the name, the text's decorators and
    then its indentation decide. Written at another indentation it is moved to the one of what it replaces. Decorators
    of the file stay unless the text has its own. Line endings, and bytes that are no UTF-8, stay as they are.

    Raises DefinitionRefused: the text is no single definition, the file has none of the name or several, or one of
    them does not parse, or the file would not with the text in it.
    """
    new, written = _single(text)
    source = data.decode("utf-8", "surrogateescape")
    mark = _BOM if source.startswith(_BOM) else ""
    lines = source.removeprefix(_BOM).split("\n")
    try:
        found = definitions(_parseable(lines))
    except (SyntaxError, ValueError) as error:
        raise DefinitionRefused("the file does not parse") from error
    target = _target(found, lines, new, written)
    first = target.decorated if new.decorated < new.first else target.first
    body, start = _moved(written, new, target.indent), min(new.decorated, new.first) - 1
    above = [line.strip() for line in lines[max(first - 1 - start, 0) : first - 1]]
    if start and above == [line.strip() for line in written[:start]]:  # a comment that stands there already
        body = body[start:]
    last = _with_comments(lines, target)
    old = lines[first - 1 : last]
    if "\ufffd" in text and re.search("[\ud800-\udfff]", "".join(old)):
        raise DefinitionRefused("the definition holds bytes that are no text")
    ending = (
        "\r" if (lines[target.first - 1] if target.first < len(lines) else lines[0]).endswith("\r") else ""
    )
    body = [line + ending for line in body]
    if last == len(lines):  # the file does not end in a newline
        body[-1] = body[-1].removesuffix("\r")
    if old[0].startswith("\f"):
        body[0] = "\f" + body[0]
    result = [*lines[: first - 1], *body, *lines[last:]]
    _check(result, found, target, first - 1 + len(body))
    return (mark + "\n".join(result)).encode("utf-8", "surrogateescape")


def _parseable(lines: list[str]) -> str:
    """The same lines without their carriage returns and with bytes that are no UTF-8, which the parser refuses, as
    some letter."""
    return "\n".join(re.sub("[\ud800-\udfff]", "x", line.removesuffix("\r")) for line in lines)


def _single(text: str) -> tuple[Definition, list[str]]:
    """The definition that ``text`` is, and its lines without blank ones around it."""
    lines = text.replace("\r\n", "\n").rstrip().split("\n")
    while lines and not lines[0].strip():
        del lines[0]
    indent = _indent_of(lines[0]) if lines else ""
    source = "\n".join(line.removeprefix(indent) for line in lines)
    try:
        body = ast.parse(source).body
        found = definitions(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DefinitionRefused(_reason(error)) from error
    if len(body) != 1 or not isinstance(body[0], Node):
        raise DefinitionRefused("not one def or class")
    outer = found[0]
    return (
        Definition(outer.name, outer.first, outer.last, outer.decorated, indent, (), outer.is_class),
        lines,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, (RecursionError, MemoryError)):
        return "too deep to parse"
    if not isinstance(error, SyntaxError):
        return str(error)
    return f"{error.msg}, line {error.lineno}" if error.lineno and "line" not in error.msg else error.msg


def _target(found: list[Definition], lines: list[str], new: Definition, written: list[str]) -> Definition:
    named = [d for d in found if d.name == new.name and d.is_class == new.is_class]
    if not named:
        raise DefinitionRefused(f"no {'class' if new.is_class else 'def'} {new.name[:40]}", missing=True)

    def decorators(d: Definition, lines: list[str]) -> list[str]:
        return [line.strip() for line in lines[d.decorated - 1 : d.first - 1]]

    if len(named) > 1 and new.decorated < new.first:
        named = [d for d in named if decorators(d, lines) == decorators(new, written)] or named
    if len(named) > 1:
        named = [d for d in named if d.indent == new.indent] or named
    if len(named) > 1:
        raise DefinitionRefused(f"{len(named)} are called {new.name[:40]}")
    return named[0]


def _with_comments(lines: list[str], target: Definition) -> int:
    """The target's last line, comments that still belong to its block with it."""
    last = target.last
    while last < len(lines) and lines[last].lstrip().startswith("#"):
        indent = _indent_of(lines[last])
        if len(indent) <= len(target.indent) or not indent.startswith(target.indent):
            break
        last += 1
    return last


def _moved(written: list[str], new: Definition, wanted: str) -> list[str]:
    """Lines at another indentation; those that begin inside a string keep theirs, or its value would change."""
    if new.indent == wanted:
        return list(written)
    tree = ast.parse("\n".join(line.removeprefix(new.indent) for line in written))
    inside = {
        number
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
        and isinstance(getattr(node, "value", ""), (str, bytes))
        for number in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }
    return [
        wanted + line.removeprefix(new.indent) if line.strip() and number not in inside else line
        for number, line in enumerate(written, 1)
    ]


def _check(result: list[str], found: list[Definition], target: Definition, last: int) -> None:
    """Raises DefinitionRefused unless the result, in which the new text ends at line ``last``, parses and holds every
    other definition as before."""
    try:
        after = definitions(_parseable(result))
    except (SyntaxError, ValueError) as error:
        raise DefinitionRefused("the file would not parse with it") from error

    def outside(all_of: list[Definition], until: int) -> list[tuple[tuple[str, ...], str]]:
        return [(d.within, d.name) for d in all_of if not target.decorated <= d.first <= until]

    if outside(found, target.last) != outside(after, last):
        raise DefinitionRefused("not one def or class")
