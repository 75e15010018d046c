"""Plausible wrong edits, so that demonstrations hold a failed test and what to do after it."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection

from cadenza.rollouts.gold_edits import innermost

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


def near_line(source: str, line: int, rng: random.Random, among: Collection[int]) -> tuple[int, str] | None:
    """Number (from 1) and text of another line of the innermost function or class around ``line``, the nearer the
    likelier: of those ``among``, after its header and docstring, and not blank. None when there is none, or the source
    does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    block = innermost(tree, line)
    if block is None:
        return None
    texts = source.split("\n")
    body = block.body[1:] if ast.get_docstring(block) is not None else block.body
    first, last = (body[0].lineno, block.end_lineno or block.lineno) if body else (1, 0)
    found = [n for n in range(first, last + 1) if n != line and n in among and texts[n - 1].strip()]
    if not found:
        return None
    at = rng.choices(found, [1 / abs(n - line) for n in found])[0]
    return at, texts[at - 1].removesuffix("\r")
