"""Plausible wrong edits, so that demonstrations hold a failed test and what to do after it."""

from __future__ import annotations

import ast
import random
import re

_SWAPS: tuple[tuple[str, str], ...] = (
    (" + ", " - "), (" - ", " + "), (" * ", " + "), (" // ", " / "), (" < ", " <= "), (" <= ", " < "),
    (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == "), (" and ", " or "), (" or ", " and "),
    ("True", "False"), ("False", "True"), ("min(", "max("), ("max(", "min("), (" not in ", " in "),
    ("not ", ""), ("append(", "extend("), ("[0]", "[-1]"), ("[-1]", "[0]"),
)  # fmt: skip


def wrong_line(right: str, buggy: str, rng: random.Random) -> str | None:
    """A line one small slip away from the right one, and not the buggy line either; None if there is none."""
    candidates: list[str] = []
    for old, new in _SWAPS:
        for match in re.finditer(re.escape(old), right):
            candidates.append(right[: match.start()] + new + right[match.end() :])
    for match in re.finditer(r"(?<![\w.])\d(?![\w.])", right):
        digit = int(match.group())
        for other in {digit + 1, max(digit - 1, 0)} - {digit}:
            candidates.append(right[: match.start()] + str(other) + right[match.end() :])
    candidates = sorted({line for line in candidates if line not in (right, buggy) and line.strip()})
    return rng.choice(candidates) if candidates else None


def wrong_definition(old: str, new: str, rng: random.Random, elsewhere: bool) -> str | None:
    """A definition that does not do what ``new`` does: with a slip in a line that ``old`` has wrong too, or
    (``elsewhere``) ``old`` with a slip in a line that was right. None when there is no such slip.

    Headers and docstrings, which say what it should do, are left alone.
    """
    before, after = old.split("\n"), new.split("\n")
    lines = before if elsewhere else after
    kept = set(before) & set(after)
    code = _code_lines(lines)
    places = [i for i, line in enumerate(lines) if i in code and (line in kept) == elsewhere]
    rng.shuffle(places)
    for i in places:
        wrong = wrong_line(lines[i], before[i] if i < len(before) else "", rng)
        if wrong is not None:
            text = "\n".join([*lines[:i], wrong, *lines[i + 1 :]])
            if text not in (old, new):
                return text
    return None


def _code_lines(lines: list[str]) -> set[int]:
    """Places (from 0) of lines that belong to a statement and to no header or docstring of a definition."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    code: set[int] = set()
    said: set[int] = set()
    for node in ast.walk(ast.parse("\n".join(line[indent:] for line in lines))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            said.update(range(node.lineno - 1, node.body[0].lineno - 1))
            if ast.get_docstring(node) is not None:
                said.update(range(node.body[0].lineno - 1, node.body[0].end_lineno or 0))
        elif isinstance(node, ast.stmt):
            code.update(range(node.lineno - 1, node.end_lineno or node.lineno))
    return code - said
