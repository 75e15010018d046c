"""Turns pytest's many-line explanation of one failure into one line with the call and the values.

``assert total([1, 2], 3) == 6, got 5`` costs a small model twenty tokens and holds everything it needs. The source
line comes from the test file, the value from pytest's message, because pytest drops the call for lists and strings.
"""

from __future__ import annotations

import ast
import re

_MOST_SOURCE = 160
_MOST_VALUE = 60
_OWN_PLACE = re.compile(r" \([^()]*, line \d+\)$")
_OPERATORS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip


def failure_line(message: str, source: str | None, place: str | None) -> str:
    """One line for one failure.

    Args:
        message: pytest's crash message, many lines.
        source: the source line it names, if it could be read.
        place: ``path:N`` of that line, shown for an exception, whose source line says little without it.
    """
    source = (source or "").strip()
    explained = _explained(message)
    if explained is not None:
        if source.startswith("assert ") and len(source) <= _MOST_SOURCE:
            got = _got(source, explained)
            if got is not None:
                return f"{source}, got {_short(got, _MOST_VALUE)}"
        return _short(_with_calls(explained, message), _MOST_SOURCE)
    first = message.strip().split("\n", 1)[0].removeprefix("Failed: ")
    first = first.replace("/work/", "")
    if not (place and _is_exception(first)):
        return _short(first, _MOST_SOURCE)
    # A SyntaxError says its place itself, in more tokens.
    return f"{_short(_OWN_PLACE.sub('', first), _MOST_SOURCE)} at {place}"


def _explained(message: str) -> str | None:
    """``5 == 6`` of ``assert 5 == 6``, which is the first line, or the second after a message of the test's own."""
    for line in message.split("\n")[:2]:
        line = line.strip().removeprefix("AssertionError: ")
        if line.startswith("assert "):
            return line.removeprefix("assert ")
    return None


def _got(source: str, explained: str) -> str | None:
    """The value on the left of the assertion; None when the source is not an assertion that stands on one line."""
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(statement, ast.Assert):
        return None
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return explained.removeprefix("not ")
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return explained
    operator = f" {_OPERATORS[type(test.ops[0])]} "
    cuts = [i for i in range(len(explained)) if explained.startswith(operator, i)]
    value, other = (0, 1) if not isinstance(test.ops[0], (ast.In, ast.NotIn)) else (1, 0)
    sides = [(explained[:i], explained[i + len(operator) :]) for i in cuts]
    for pair in sides:
        if _is_literal(pair[value]) and (_is_literal(pair[other]) or len(sides) == 1):
            return pair[value]
    return sides[0][value] if sides else None


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _with_calls(explained: str, message: str) -> str:
    """Puts the calls of pytest's ``where`` lines back in: ``5 == 6`` -> ``assert f(1) == 6, got 5``."""
    for line in message.split("\n"):
        text = line.strip()
        if not text.startswith("+  where "):
            continue
        value, equals, call = text.removeprefix("+  where ").partition(" = ")
        if equals and value in explained:
            return f"assert {explained.replace(value, call, 1)}, got {_short(value, _MOST_VALUE)}"
    return f"assert {explained}"


def _is_exception(line: str) -> bool:
    name = line.partition(":")[0]
    return name.isidentifier() and name[0].isupper()


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
