"""Bug families on names, calls, indices, returned values and the order of statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from cadenza.tasks.families import Mutation, Scope, family


@family
def wrong_variable(scope: Scope) -> Iterator[Mutation]:
    """Another name in scope."""
    for f, node in scope.nodes:
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or scope.in_initial(node):
            continue
        parent = scope.parents[node]
        if isinstance(parent, ast.Call) and parent.func is node:
            continue
        if isinstance(parent, ast.Return):
            continue
        names = scope.locals_of(f, node.lineno)
        if node.id not in names:
            continue
        for other in names:
            if other != node.id:
                yield scope.splice("wrong_variable", node, other)


@family
def wrong_return_value(scope: Scope) -> Iterator[Mutation]:
    """Another local, the other truth value, or a pair the wrong way round is returned."""
    name = "wrong_return_value"
    for f, node in scope.nodes:
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):
            yield scope.splice(name, value, str(not value.value))
        elif isinstance(value, ast.Constant) and value.value is None:
            yield scope.splice(name, value, "0")
        elif isinstance(value, ast.Name):
            for other in scope.locals_of(f, node.lineno):
                if other != value.id:
                    yield scope.splice(name, value, other)
        elif isinstance(value, ast.Tuple) and len(value.elts) == 2:
            first, second = (scope.text(e) for e in value.elts)
            yield scope.splice(name, value, f"{second}, {first}")
        elif isinstance(value, (ast.BinOp, ast.Subscript)):
            inner = value.left if isinstance(value, ast.BinOp) else value.value
            if isinstance(inner, (ast.Name, ast.Attribute)):
                yield scope.splice(name, value, scope.text(inner))


_SWAPPED_WITH_OWNER = ("join", "startswith", "endswith", "append")


@family
def swapped_arguments(scope: Scope) -> Iterator[Mutation]:
    """Two positional arguments of a call, or the two sides of a pair, the wrong way round."""
    for node in scope.of(ast.Call):
        positional = [a for a in node.args if not isinstance(a, ast.Starred)]
        symmetric = isinstance(node.func, ast.Name) and node.func.id in ("max", "min")
        if len(positional) >= 2 and not symmetric:
            yield _swap(scope, positional[0], positional[1])
    for node in scope.of(ast.Call):
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _SWAPPED_WITH_OWNER:
            continue
        if len(node.args) == 1 and isinstance(node.args[0], (ast.Name, ast.Constant)):
            yield _swap(scope, node.func.value, node.args[0])


def _swap(scope: Scope, first: ast.expr, second: ast.expr) -> Mutation:
    line = scope.lines[first.lineno - 1]
    text = (
        line[: first.col_offset]
        + scope.text(second)
        + line[first.end_col_offset : second.col_offset]
        + scope.text(first)
        + line[second.end_col_offset :]
    )
    return Mutation("swapped_arguments", first.lineno - 1, text)


@family
def missing_call(scope: Scope) -> Iterator[Mutation]:
    """A conversion that was forgotten: ``.strip()``, ``abs(...)``, ``int(...)``, ``sorted(...)``."""
    for node in scope.of(ast.Call):
        f = node.func
        if isinstance(f, ast.Name) and f.id in (
            "abs",
            "int",
            "str",
            "sorted",
            "reversed",
            "dict",
            "list",
            "sum",
            "len",
        ):
            if len(node.args) == 1 and not scope.in_initial(node):
                yield scope.splice("missing_call", node, scope.text(node.args[0]))
        elif isinstance(f, ast.Name) and f.id in ("max", "min") and len(node.args) == 2:
            yield scope.splice("missing_call", node, scope.text(node.args[0]))
        elif isinstance(f, ast.Attribute) and f.attr in (
            "strip",
            "lower",
            "upper",
            "title",
            "replace",
            "rjust",
            "ljust",
        ):
            yield scope.splice("missing_call", node, scope.text(f.value))


_METHODS = {
    "append": ("extend",),
    "lower": ("upper", "strip"),
    "upper": ("lower", "title"),
    "title": ("upper",),
    "strip": ("lstrip", "lower"),
    "startswith": ("endswith",),
    "endswith": ("startswith",),
    "ljust": ("rjust",),
    "rjust": ("ljust",),
    "items": ("keys",),
    "find": ("rfind",),
    "split": ("partition",),
    "get": ("pop",),
    "values": ("keys",),
}
_BUILTINS = {
    "max": ("min",),
    "min": ("max",),
    "sum": ("max", "len"),
    "len": ("sum", "max"),
    "sorted": ("list",),
}


@family
def wrong_method(scope: Scope) -> Iterator[Mutation]:
    """A sibling method or builtin."""
    for node in scope.of(ast.Call):
        f = node.func
        if isinstance(f, ast.Attribute):
            for other in _METHODS.get(f.attr, ()):
                yield scope.splice("wrong_method", f, f"{scope.text(f.value)}.{other}")
        elif isinstance(f, ast.Name):
            for other in _BUILTINS.get(f.id, ()):
                yield scope.splice("wrong_method", f, other)


@family
def wrong_index_or_slice(scope: Scope) -> Iterator[Mutation]:
    """An index, a slice or a range that is shifted, cut at the wrong end or reversed."""
    name = "wrong_index_or_slice"
    for node in scope.of(ast.Subscript):
        if isinstance(node.slice, ast.Slice):
            for text in _other_slices(scope, node.slice):
                yield scope.splice(name, node.slice, text)
        elif not (isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)):
            for text in _other_index(scope, node.slice):
                yield scope.splice(name, node.slice, text)
    for node in scope.of(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            for old, new in _other_ranges(scope, node):
                yield scope.splice(name, old, new)


def _other_slices(scope: Scope, node: ast.Slice) -> Iterator[str]:
    low = scope.text(node.lower) if node.lower else ""
    high = scope.text(node.upper) if node.upper else ""
    if node.step:
        yield ":"
    elif low and high:
        yield (
            f"{low}:{high} + 1"
            if not isinstance(node.upper, ast.Constant)
            else f"{low}:{_add(node.upper, 1)}"
        )
        yield (
            f"{low} + 1:{high}"
            if not isinstance(node.lower, ast.Constant)
            else f"{_add(node.lower, 1)}:{high}"
        )
        yield f"{low}:"
        yield f":{high}"
    elif low or high:
        yield f"{high}:" if high else f":{low}"
        bound = node.upper or node.lower
        assert bound is not None
        shifted = _add(bound, 1) if isinstance(bound, ast.Constant) else f"{scope.text(bound)} + 1"
        yield f":{shifted}" if high else f"{shifted}:"


def _add(node: ast.expr, n: int) -> str:
    value = node.value if isinstance(node, ast.Constant) else 0
    return str(value + n) if isinstance(value, int) else "1"


def _other_index(scope: Scope, node: ast.expr) -> Iterator[str]:
    text = scope.text(node)
    table = {"0": ("-1", "1"), "-1": ("0",), "1": ("0", "-1"), "-2": ("-1",)}
    if text in table:
        yield from table[text]
    elif isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
        yield scope.text(node.left)
    elif isinstance(node, ast.Name) and len(node.id) == 1:
        yield f"{text} - 1"


def _other_ranges(scope: Scope, node: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    for i, bound in enumerate(node.args[:2]):
        text = scope.text(bound)
        if isinstance(bound, ast.BinOp) and isinstance(bound.right, ast.Constant):
            yield bound, scope.text(bound.left)
        elif isinstance(bound, ast.Constant):
            yield bound, _add(bound, 1)
            if len(node.args) > 1 and i == 0 and bound.value:
                yield bound, "0"
        else:
            yield bound, f"{text} + 1"
            yield bound, f"{text} - 1"


@family
def wrong_key_or_default(scope: Scope) -> Iterator[Mutation]:
    """Another key of the row, another key variable, or another default."""
    name = "wrong_key_or_default"
    keys = sorted(
        {
            n.value
            for n in scope.of(ast.Constant)
            if isinstance(n.value, str) and n.value.isidentifier() and _is_key(scope, n)
        }
    )
    for node in scope.of(ast.Constant):
        if _is_key(scope, node) and isinstance(node.value, str):
            for other in (*keys, node.value + "s"):
                if other != node.value:
                    yield scope.splice(name, node, f'"{other}"')
    for node in scope.of(ast.Call):
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in ("get", "setdefault")
            and len(node.args) == 2
        ):
            default = node.args[1]
            if isinstance(default, ast.Constant) and isinstance(default.value, int):
                yield scope.splice(name, default, str(default.value + 1))
                yield scope.splice(name, default, "None")
            elif isinstance(default, ast.UnaryOp):
                yield scope.splice(name, default, "0")
            elif isinstance(default, ast.Constant):
                yield scope.splice(name, default, "0" if default.value is None else "None")


def _is_key(scope: Scope, node: ast.Constant) -> bool:
    parent = scope.parents[node]
    if isinstance(parent, ast.Subscript):
        return parent.slice is node and isinstance(node.value, str)
    return (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Attribute)
        and parent.func.attr in ("get", "setdefault")
        and parent.args[0] is node
    )


@family
def dropped_statement(scope: Scope) -> Iterator[Mutation]:
    """A line that was lost; the repair puts it back."""
    for body in _blocks(scope):
        for statement in body:
            simple = isinstance(statement, (ast.AugAssign, ast.Expr, ast.Assign, ast.Delete))
            if simple and len(body) > 1 and id(statement) not in scope.initial:
                yield Mutation("dropped_statement", statement.lineno - 1, None)


@family
def wrong_indentation(scope: Scope) -> Iterator[Mutation]:
    """A statement inside the loop or branch that belongs after it, or the reverse."""
    name = "wrong_indentation"
    for body in _blocks(scope):
        for before, after in pairwise(body):
            if isinstance(before, (ast.For, ast.While, ast.If)) and _one_line(after):
                last = _deepest_last(before)
                line = scope.lines[after.lineno - 1].lstrip()
                yield Mutation(name, after.lineno - 1, " " * last.col_offset + line)
                if last.col_offset > before.col_offset + 4:
                    yield Mutation(name, after.lineno - 1, " " * (before.col_offset + 4) + line)
    for node in scope.of(ast.For, ast.While, ast.If):
        block = node.orelse or node.body
        if len(block) > 1 and _one_line(block[-1]):
            last = block[-1]
            yield Mutation(
                name, last.lineno - 1, " " * (last.col_offset - 4) + scope.lines[last.lineno - 1].lstrip()
            )


def _one_line(statement: ast.stmt) -> bool:
    return statement.lineno == statement.end_lineno


def _deepest_last(statement: ast.stmt) -> ast.stmt:
    while isinstance(statement, (ast.For, ast.While, ast.If)):
        statement = (statement.orelse or statement.body)[-1]
    return statement


def _blocks(scope: Scope) -> Iterator[list[ast.stmt]]:
    """Every list of statements in function bodies, docstrings left out."""
    for f in scope.functions:
        yield [s for s in f.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    for node in scope.of(ast.For, ast.While, ast.If):
        yield node.body
        if node.orelse and not (len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)):
            yield node.orelse
