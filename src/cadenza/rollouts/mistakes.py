"""Plausible wrong edits of one line, so that demonstrations hold a failed test and its repair."""

from __future__ import annotations

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
