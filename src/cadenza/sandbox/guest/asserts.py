"""Failed assertions that tell both sides, at a tenth of the price of pytest's own rewriting.

pytest rewrites every assertion into some forty AST nodes so that each sub-expression can be shown: 1.3 ms for a
file of four tests, paid by every run, passing or not. Here ``assert L == R`` keeps its two operands and nothing
more (0.1 ms); the message is made only when it fails, from the values and the source text.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import sys
from typing import Any, cast

EXPLAIN = "@explain"  # in builtins; no program can name it
_LEFT, _RIGHT = "@left", "@right"
_PLAIN = (
    ast.Constant,
    ast.Name,
    ast.List,
    ast.Tuple,
    ast.Dict,
    ast.Set,
    ast.JoinedStr,
)  # say nothing beyond the value
_OPERATORS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_VALUE_LIMIT = 240  # characters of one value


def transform(tree: ast.Module) -> ast.Module:
    """Rewrites every ``assert`` statement in place."""
    bodies: list[list[Any]] = [tree.body]
    while bodies:
        body = bodies.pop()
        for index in range(len(body) - 1, -1, -1):
            statement = body[index]
            if type(statement) is ast.Assert:
                body[index : index + 1] = _rewritten(statement)
                continue
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, None)
                if inner:
                    bodies.append(inner)
            for holder in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                bodies.append(holder.body)
    return tree


def _rewritten(node: ast.Assert) -> list[ast.stmt]:
    test = node.test
    place = {
        "lineno": node.lineno,
        "col_offset": node.col_offset,
        "end_lineno": node.end_lineno,
        "end_col_offset": node.end_col_offset,
    }

    def name(text: str, context: ast.expr_context) -> ast.Name:
        return ast.Name(text, context, **place)

    def keep(text: str, value: ast.expr) -> ast.expr:
        return ast.NamedExpr(name(text, ast.Store()), value, **place)

    kept = [_LEFT]
    if type(test) is ast.Compare and len(test.ops) == 1:
        right = test.comparators[0]
        kept.append(_RIGHT)
        form = (_OPERATORS[type(test.ops[0])], _span(test.left), _span(right))
        condition: ast.expr = ast.Compare(keep(_LEFT, test.left), test.ops, [keep(_RIGHT, right)], **place)
    elif type(test) is ast.UnaryOp and type(test.op) is ast.Not:
        form = ("not", _span(test.operand), None)
        condition = ast.UnaryOp(test.op, keep(_LEFT, test.operand), **place)
    else:
        form = ("", _span(test), None)
        condition = keep(_LEFT, test)
    right_value = name(_RIGHT, ast.Load()) if len(kept) == 2 else ast.Constant(None, **place)
    arguments = [ast.Constant(cast(Any, form), **place), name(_LEFT, ast.Load()), right_value]
    if node.msg is not None:
        arguments.append(node.msg)
    error = ast.Call(name(EXPLAIN, ast.Load()), arguments, [], **place)
    failed = ast.UnaryOp(ast.Not(), condition, **place)
    check = ast.If(failed, [ast.Raise(error, None, **place)], [], **place)
    # The operands must not outlive the statement: a test may count references.
    clear = ast.Assign([name(text, ast.Store()) for text in kept], ast.Constant(None, **place), **place)
    return [check, clear]


def _span(node: ast.expr) -> tuple[int, int, int, int] | None:
    """Where the text of an operand stands, or None where it would only repeat the value."""
    if isinstance(node, _PLAIN):
        return None
    return (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)


def explain(form: tuple[str, Any, Any], left: Any, right: Any, *message: Any) -> AssertionError:
    """The error to raise: ``[message\\n]assert 8 == 7\\n +  where 8 = total([3, 4])``."""
    operator, left_span, right_span = form
    shown = value_text(left)
    if operator and operator != "not":
        text = f"assert {shown} {operator} {value_text(right)}"
    else:
        text = f"assert {operator} {shown}" if operator else f"assert {shown}"
    frame = sys._getframe(1)
    for span, value in ((left_span, left), (right_span, right)):
        if span is not None:
            text += f"\n +  where {value_text(value)} = {_source(frame.f_code.co_filename, span)}"
    return AssertionError(f"{message[0]}\n{text}" if message else text)


def value_text(value: Any) -> str:
    """``repr``, at most _VALUE_LIMIT characters, whatever the object does."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<unprintable {type(value).__name__}: {type(error).__name__}>"
    if len(text) > _VALUE_LIMIT:
        half = _VALUE_LIMIT // 2 - 2
        text = f"{text[:half]}...{text[-half:]}"
    return text


def _source(path: str, span: tuple[int, int, int, int]) -> str:
    first, start, last, end = span
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()[first - 1 : last]
        lines[-1] = lines[-1][:end]  # offsets count bytes
        lines[0] = lines[0][start:]
        return " ".join(line.strip().decode(errors="replace") for line in lines)
    except (OSError, IndexError):
        return "?"


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a test module with its assertions rewritten; never reads or writes bytecode files."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        return compile(transform(tree), path, "exec", dont_inherit=True)


class Finder:
    """On ``sys.meta_path``: test modules below ``root`` get the loader above."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        leaf = name.rpartition(".")[2]
        if not (leaf.startswith("test_") or leaf.endswith("_test") or leaf == "conftest"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not (spec.origin or "").startswith(self._root + "/"):
            return None
        if type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(name, spec.origin or "")
        return spec


def install(root: str) -> Finder:
    """Puts the finder in front and the explanation in builtins; returns the finder so that it can be removed."""
    setattr(builtins, EXPLAIN, explain)
    finder = Finder(root)
    sys.meta_path.insert(0, finder)
    return finder
