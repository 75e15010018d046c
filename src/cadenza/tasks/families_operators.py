"""Bug families on operators, constants and conditions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeVar

from cadenza.tasks.families import Mutation, Scope, comparisons, family, symbol
from cadenza.tasks.words import SAMPLE_WORDS

T = TypeVar("T", int, str)


@family
def comparison_boundary(scope: Scope) -> Iterator[Mutation]:
    """``<`` for ``<=`` and the like."""
    yield from comparisons(scope, "comparison_boundary", {"<": "<=", "<=": "<", ">": ">=", ">=": ">"})


@family
def wrong_comparison_direction(scope: Scope) -> Iterator[Mutation]:
    """``<`` for ``>`` and the like."""
    yield from comparisons(scope, "wrong_comparison_direction", {"<": ">", ">": "<", "<=": ">=", ">=": "<="})


@family
def negated_condition(scope: Scope) -> Iterator[Mutation]:
    """A test turned into its opposite."""
    name = "negated_condition"
    table = {"==": "!=", "!=": "==", "in": "not in", "not in": "in", "is": "is not", "is not": "is"}
    yield from comparisons(scope, name, table)
    for node in scope.of(ast.UnaryOp):
        if isinstance(node.op, ast.Not):
            yield scope.splice(name, node, scope.text(node.operand))
    for node in scope.of(ast.If, ast.IfExp):
        if isinstance(node.test, (ast.Name, ast.Call)):
            yield scope.splice(name, node.test, f"not {scope.text(node.test)}")


@family
def boolean_operator(scope: Scope) -> Iterator[Mutation]:
    """``and`` for ``or``."""
    for node in scope.of(ast.BoolOp):
        old = symbol(node.op)
        m = scope.between(
            "boolean_operator", node.values[0], node.values[1], old, {"and": "or", "or": "and"}[old]
        )
        if m:
            yield m


@family
def arithmetic_operator(scope: Scope) -> Iterator[Mutation]:
    """Another arithmetic operator between the same operands."""
    table = {"+": ("-", "*"), "-": ("+",), "*": ("+", "//"), "//": ("*", "%"), "%": ("//",)}
    for node in scope.of(ast.BinOp):
        old = symbol(node.op)
        if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            continue
        if _inside_subscript_or_range(scope, node):
            continue
        for new in table.get(old, ()):
            m = scope.between("arithmetic_operator", node.left, node.right, old, new)
            if m:
                yield m


@family
def swapped_operands(scope: Scope) -> Iterator[Mutation]:
    """``b - a`` for ``a - b``."""
    for node in scope.of(ast.BinOp):
        if symbol(node.op) not in ("-", "//", "%", "+"):
            continue
        left, right = scope.text(node.left), scope.text(node.right)
        if symbol(node.op) == "+" and not _texty(node):
            continue
        if isinstance(node.right, ast.BinOp):
            right = f"({right})"
        yield scope.splice("swapped_operands", node, f"{right} {symbol(node.op)} {left}")


def _texty(node: ast.BinOp) -> bool:
    """Whether ``+`` joins sequences: a string constant or a slice takes part."""
    return any(
        isinstance(n, ast.Slice) or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        for n in ast.walk(node)
    )


@family
def off_by_one_constant(scope: Scope) -> Iterator[Mutation]:
    """An integer that is one too large or too small."""
    for node, v in plain_constants(scope, int):
        for value in (v + 1, v - 1):
            yield scope.splice("off_by_one_constant", node, str(value))


@family
def wrong_constant_value(scope: Scope) -> Iterator[Mutation]:
    """Another number or text where a constant stands."""
    rng = scope.rng
    for node, v in plain_constants(scope, int):
        others = (v + rng.randint(2, 9), v * 2 + 1, max(v - rng.randint(2, 9), 0), v * 10)
        for value in others:
            if abs(value - v) > 1:
                yield scope.splice("wrong_constant_value", node, str(value))
    for node, text in plain_constants(scope, str):
        marks = [m for m in ",;-/:|.+_# ()[]" if m != text]
        others = [rng.choice(marks)] if len(text) <= 1 else [rng.choice(SAMPLE_WORDS), text[:-1]]
        for value in others:
            yield scope.splice("wrong_constant_value", node, f'"{value}"')


def plain_constants(scope: Scope, kind: type[T]) -> Iterator[tuple[ast.Constant, T]]:
    """Constants that no other family owns: not in subscripts, ranges, initial values, keys or defaults."""
    for node in scope.of(ast.Constant):
        value = node.value
        if (
            not isinstance(value, kind)
            or isinstance(value, bool)
            or scope.in_initial(node)
            or _inside_subscript_or_range(scope, node)
        ):
            continue
        parent = scope.parents[node]
        if (
            isinstance(parent, ast.Call)
            and isinstance(parent.func, ast.Attribute)
            and parent.func.attr in ("get", "setdefault", "pop")
        ):
            continue
        if isinstance(parent, ast.UnaryOp):
            continue
        yield node, value


def _inside_subscript_or_range(scope: Scope, node: ast.AST) -> bool:
    child: ast.AST | None = node
    while child is not None:
        parent = scope.parents.get(child)
        if isinstance(parent, ast.Subscript) and parent.slice is child:
            return True
        if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "range":
            return True
        child = parent if not isinstance(parent, ast.stmt) else None
    return False


@family
def wrong_augmented_assign(scope: Scope) -> Iterator[Mutation]:
    """``-=`` or ``=`` for ``+=`` and the like."""
    table = {"+": ("-=", "="), "-": ("+=", "="), "*": ("+=", "="), "//": ("-=", "%=")}
    for node in scope.of(ast.AugAssign):
        old = symbol(node.op)
        for new in table.get(old, ()):
            m = scope.between("wrong_augmented_assign", node.target, node.value, old + "=", new)
            if m:
                yield m


@family
def wrong_initial_value(scope: Scope) -> Iterator[Mutation]:
    """An accumulator, best value or attribute that starts wrong."""
    name = "wrong_initial_value"
    for node in scope.of(ast.Assign):
        if id(node) not in scope.initial:
            continue
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for value in values:
            for text in _other_start(scope, value):
                yield scope.splice(name, value, text)


def _other_start(scope: Scope, value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Constant) and type(value.value) is int:
        v = value.value
        yield str(v + 1)
        yield str(v - 1) if v else str(scope.rng.randint(2, 9))
        yield "0" if v else "-1"
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield '" "' if value.value == "" else '""'
        yield '"a"'
    elif isinstance(value, ast.Constant):
        yield "0"
    elif isinstance(value, ast.List) and not value.elts:
        yield "[0]"
        yield "[1]"
    elif isinstance(value, ast.Dict) and not value.keys:
        yield "{0: 0}"
        yield '{"a": 1}'
    elif isinstance(value, ast.Call):  # dict(old)
        yield "{}"
        yield "dict()"
    elif isinstance(value, ast.Subscript):  # xs[0]
        yield '""'
        yield scope.text(value.value)
    elif isinstance(value, ast.Name):
        yield "0"
        yield "1"
