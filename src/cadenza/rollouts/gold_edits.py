"""The gold patch as calls of edit_line: which line becomes which text."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LineEdit:
    """Line ``line`` (from 1, of the file before any edit) becomes ``new``; an empty list deletes it."""

    path: str
    line: int
    old: str
    new: tuple[str, ...]

    @property
    def body(self) -> str:
        """The text after the first line of the call. One blank line cannot be said by edit_line (it deletes)."""
        return "\n".join(self.new)


def gold_edits(base: Mapping[str, bytes], fixed: Mapping[str, bytes]) -> dict[str, list[LineEdit]]:
    """Edits by file that turn ``base`` into ``fixed``, in each file from the bottom up so that numbers stay valid.

    Raises ValueError for what edit_line cannot do: files created, deleted or renamed, and a lone blank line.
    """
    edits: dict[str, list[LineEdit]] = {}
    if base.keys() != fixed.keys():
        raise ValueError(f"the patch adds or removes files: {sorted(base.keys() ^ fixed.keys())}")
    for path in sorted(base):
        if base[path] != fixed[path]:
            edits[path] = _file_edits(path, _lines(base[path]), _lines(fixed[path]))
    return edits


Block = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def innermost(tree: ast.AST, line: int) -> Block | None:
    """The innermost function or class around a line; None outside any."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, Block) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def enclosing_name(source: str, line: int) -> str | None:
    """Name of the innermost function or class around a line; None outside any, or when the source does not parse."""
    try:
        block = innermost(ast.parse(source), line)
    except (SyntaxError, ValueError):
        return None
    return block.name if block else None


def _lines(data: bytes) -> list[str]:
    lines = data.decode("utf-8").split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _file_edits(path: str, old: list[str], new: list[str]) -> list[LineEdit]:
    if not old:
        raise ValueError(f"{path}: edit_line cannot write into an empty file")
    becomes: list[tuple[str, ...]] = [(line,) for line in old]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "insert":  # goes with the line before it, or with the first line
            becomes[max(i1 - 1, 0)] = (
                (*new[j1:j2], *becomes[0]) if i1 == 0 else (*becomes[i1 - 1], *new[j1:j2])
            )
        elif tag != "equal":
            paired = i2 - i1 == j2 - j1
            for i in range(i1, i2):
                becomes[i] = (new[j1 + i - i1],) if paired else tuple(new[j1:j2]) if i == i1 else ()
    if ("",) in [text for line, text in zip(old, becomes, strict=True) if text != (line,)]:
        raise ValueError(f"{path}: edit_line cannot write a single blank line")
    return [
        LineEdit(path, i + 1, old[i], becomes[i])
        for i in reversed(range(len(old)))
        if becomes[i] != (old[i],)
    ]
