"""Functions and classes of a Python file, found by name and replaced with every other byte left alone."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


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

    Raises SyntaxError or ValueError, as ``ast.parse`` does.
    """
    lines = source.split("\n")
    found: list[Definition] = []

    def walk(node: ast.AST, within: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inside = within
            if isinstance(child, Node):
                indent = re.match(r"[ \t]*", lines[child.lineno - 1])
                found.append(
                    Definition(
                        child.name,
                        child.lineno,
                        child.end_lineno or child.lineno,
                        min([child.lineno, *(d.lineno for d in child.decorator_list)]),
                        indent.group() if indent else "",
                        within,
                        isinstance(child, ast.ClassDef),
                    )
                )
                inside = (*within, child.name)
            walk(child, inside)

    walk(ast.parse(source), ())
    return sorted(found, key=lambda d: (d.first, d.last))


def innermost(source: str, line: int) -> Definition | None:
    """The innermost definition around a line; None outside any, or when the source does not parse."""
    try:
        around = [d for d in definitions(source) if d.decorated <= line <= d.last]
    except (SyntaxError, ValueError):
        return None
    return max(around, key=lambda d: d.first, default=None)


def replace_definition(data: bytes, text: str) -> bytes:
    """Puts a whole new definition in the place of the one of the same name and kind in ``data``.

    The text's first line (after decorators, if it has any) names what is replaced; where several have the name, its
    indentation decides. Written at another indentation it is moved to the one of what it replaces. Decorators of the
    file stay unless the text has its own. Line endings and bytes that are no UTF-8 stay as they are.

    Raises DefinitionRefused: the text is no single definition, the file has none of the name or several, or does not
    parse.
    """
    written = text.strip("\n").rstrip()
    new = _single(written)
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    try:
        found = definitions(_parseable(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DefinitionRefused("the file does not parse") from error
    target = _target(found, new)
    ending = "\r" if lines[target.first - 1].endswith("\r") else ""
    first = target.decorated if new.decorated < new.first else target.first
    body = [
        line.removesuffix("\r") + ending for line in _moved(written.split("\n"), new.indent, target.indent)
    ]
    if target.last == len(lines):  # the file does not end in a newline
        body[-1] = body[-1].removesuffix("\r")
    lines[first - 1 : target.last] = body
    return "\n".join(lines).encode("utf-8", "surrogateescape")


def _parseable(lines: list[str]) -> str:
    """The same lines without what the parser would refuse or count as a line of its own."""
    return "\n".join(re.sub(r"[\ud800-\udfff\r\f]", "?", line.removesuffix("\r")) for line in lines)


def _single(text: str) -> Definition:
    """The definition that ``text`` is, lines and indentation as it is written."""
    indented = text[:1] in (" ", "\t")
    try:
        tree = ast.parse("if True:\n" + text if indented else text)
        found = definitions("if True:\n" + text if indented else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DefinitionRefused(_reason(error, int(indented))) from error
    body = tree.body[0].body if indented and isinstance(tree.body[0], ast.If) else tree.body
    if len(tree.body) != 1 or len(body) != 1 or not isinstance(body[0], Node):
        raise DefinitionRefused("not one def or class")
    return found[0]


def _reason(error: Exception, above: int) -> str:
    if not isinstance(error, SyntaxError):
        return type(error).__name__
    return f"{error.msg}, line {error.lineno - above}" if error.lineno else error.msg


def _target(found: list[Definition], new: Definition) -> Definition:
    named = [d for d in found if d.name == new.name and d.is_class == new.is_class]
    if not named:
        raise DefinitionRefused(f"no {'class' if new.is_class else 'def'} {new.name[:40]}", missing=True)
    if len(named) > 1:
        named = [d for d in named if d.indent == new.indent] or named
    if len(named) > 1:
        raise DefinitionRefused(f"{len(named)} are called {new.name[:40]}")
    return named[0]


def _moved(lines: list[str], written: str, wanted: str) -> list[str]:
    """Lines at another indentation."""
    if written == wanted:
        return lines
    return [wanted + line.removeprefix(written) if line.strip() else line for line in lines]
