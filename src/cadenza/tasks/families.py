"""Bug families: each finds sites in a correct function and says how one line of it goes wrong.

A family is a function ``Scope -> Iterator[Mutation]``. Operators splice text at positions of the syntax tree, so the
rest of the line stays byte for byte; definition lines and docstrings are never touched. A mutation may well be
harmless: whether tests kill it is found by running both versions.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

UNSEEN_FAMILIES = ("swapped_arguments", "wrong_initial_value")


Located = ast.expr | ast.stmt


@dataclass(frozen=True, slots=True)
class Mutation:
    """Line ``line`` (from 0, of the function's lines) becomes ``text``; None deletes it."""

    family: str
    line: int
    text: str | None

    def apply(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        """The lines with the mutation in them."""
        middle = () if self.text is None else (self.text,)
        return (*lines[: self.line], *middle, *lines[self.line + 1 :])


class Scope:
    """A parsed function with what the operators ask of it."""

    def __init__(self, lines: tuple[str, ...], rng: random.Random) -> None:
        self.lines = lines
        self.rng = rng
        self.tree = ast.parse("\n".join(lines))
        tops = [*self.tree.body, *(n for c in self.tree.body if isinstance(c, ast.ClassDef) for n in c.body)]
        self.functions = [n for n in tops if isinstance(n, ast.FunctionDef)]
        self.nodes: list[tuple[ast.FunctionDef, ast.AST]] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        for f in self.functions:
            for statement in f.body:
                self.parents[statement] = f
                if not _is_docstring(statement):
                    self._walk(f, statement)
        first = [s for f in self.functions for s in f.body if _is_initial(f, s)]
        self.initial = {id(s) for s in first}
        self.initial_lines = {s.lineno - 1 for s in first}

    def _walk(self, f: ast.FunctionDef, node: ast.AST) -> None:
        self.nodes.append((f, node))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.operator, ast.cmpop, ast.boolop, ast.unaryop, ast.expr_context)):
                self.parents[child] = node
                self._walk(f, child)

    def of(self, *kinds: type) -> Iterator:
        """The nodes of these kinds inside function bodies."""
        for _, node in self.nodes:
            if isinstance(node, kinds):
                yield node

    def text(self, node: Located) -> str:
        """The source of a node that lies on one line."""
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset]

    def in_initial(self, node: ast.AST) -> bool:
        """Whether the node is inside a statement that gives an initial value (a family of its own)."""
        up: ast.AST | None = node
        while up is not None:
            if id(up) in self.initial:
                return True
            up = self.parents.get(up)
        return False

    def splice(self, family: str, node: Located, text: str) -> Mutation:
        """Writes ``text`` in the place of a node that lies on one line."""
        line = self.lines[node.lineno - 1]
        return Mutation(family, node.lineno - 1, line[: node.col_offset] + text + line[node.end_col_offset :])

    def between(self, family: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Mutation | None:
        """Replaces the operator ``old`` written between two nodes."""
        line = self.lines[left.lineno - 1]
        end = left.end_col_offset or 0
        gap = line[end : right.col_offset]
        if old not in gap:
            return None
        start = end + gap.index(old)
        return Mutation(family, left.lineno - 1, line[:start] + new + line[start + len(old) :])

    def locals_of(self, f: ast.FunctionDef, before: int) -> list[str]:
        """Names bound in ``f`` when line ``before`` runs: parameters first, then assignments in order."""
        names = [a.arg for a in f.args.args if a.arg != "self"]
        for node in ast.walk(f):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno <= before:
                inner = isinstance(self.parents[node], ast.comprehension)
                if inner == (node.lineno == before):  # a comprehension's own variable lives on its line only
                    names.append(node.id)
        return list(dict.fromkeys(n for n in names if n != "_"))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_initial(f: ast.FunctionDef, statement: ast.stmt) -> bool:
    """``total = 0``, ``out = []``, ``a, b = 0, 0``, ``best = xs[0]``, ``self.value = start``: first, at function level.

    A name's first binding counts when a later statement of the function (or, for attributes, any method) changes it.
    """
    if not isinstance(statement, ast.Assign):
        return False
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Attribute):
        return f.name == "__init__"
    if any(isinstance(n, (ast.BinOp, ast.Call, ast.Compare, ast.ListComp)) for n in ast.walk(value)):
        return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict"
    names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    later = [n for n in ast.walk(f) if getattr(n, "lineno", 0) > statement.lineno]
    return any(_changes(n) & names for n in later)


def _changes(node: ast.AST) -> set[str]:
    """Names that a node rebinds or updates in place."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [node.func.value]
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


Family = Callable[[Scope], Iterator[Mutation]]
FAMILIES: dict[str, Family] = {}


def family(function: Family) -> Family:
    """Registers an operator under its own name."""
    FAMILIES[function.__name__] = function
    return function


def mutations(lines: tuple[str, ...], names: tuple[str, ...], rng: random.Random) -> list[Mutation]:
    """Every mutation of the named families, each text once (the first family in registry order owns it).

    Raises:
        KeyError: a family does not exist.
        SyntaxError: the lines are not Python.
    """
    scope = Scope(lines, rng)
    seen: set[tuple[int, str | None]] = set()
    found = []
    for name in names:
        for m in FAMILIES[name](scope):
            key = (m.line, m.text)
            if key in seen or m.text == lines[m.line]:
                continue
            if (m.line in scope.initial_lines) != (name == "wrong_initial_value"):
                continue  # such lines belong to that family alone, so that it stays unseen where it is left out
            seen.add(key)
            if compiles(m.apply(lines)):
                found.append(m)
    return found


def compiles(lines: tuple[str, ...]) -> bool:
    """Whether the lines are Python."""
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


_SYMBOL = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Div: "/",
    ast.And: "and",
    ast.Or: "or",
}


def symbol(op: ast.AST) -> str:
    """The source text of an operator node."""
    return _SYMBOL[type(op)]


def comparisons(scope: Scope, name: str, table: dict[str, str]) -> Iterator[Mutation]:
    """Replaces single comparison operators by the table."""
    for node in scope.of(ast.Compare):
        old = symbol(node.ops[0])
        if len(node.ops) == 1 and old in table:
            m = scope.between(name, node.left, node.comparators[0], old, table[old])
            if m:
                yield m
