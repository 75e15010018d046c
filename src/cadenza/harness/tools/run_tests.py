"""run_tests: the visible tests of the working folder."""

from __future__ import annotations

from typing import Any

from cadenza.harness.tools.base import ToolError, ToolResult, no_body, positional
from cadenza.harness.tools.failure_line import failure_line
from cadenza.tokens import Call


class RunTests:
    """``run_tests`` -> ``ok: 4 passed``, or one line a failing test, at most ``most``:

        test_total: assert total([1, 2], 3) == 6, got 5

    A failing test is the answer and no tool error; a run over ``timeout_s`` seconds is one.
    """

    name = "run_tests"
    usage = "run_tests"

    def __init__(self, most: int = 2, timeout_s: float = 2.0) -> None:
        self.most = most
        self.timeout_s = timeout_s

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        positional(call, 0, 0)
        no_body(call)
        result = await sandbox.pytest([], timeout_s=self.timeout_s)
        if result.timed_out:
            raise ToolError("timeout", "tests ran too long")
        bad = sum(outcome in ("failed", "error") for outcome in result.tests.values())
        if not bad and not result.failures:
            return _without_failures(result)
        lines = [_describe(failure) for failure in result.failures[: self.most]]
        hidden = max(bad, len(result.failures)) - len(lines)
        return ToolResult("\n".join(lines + ([f"+{hidden} more"] if hidden else [])))


def _without_failures(result: Any) -> ToolResult:
    """Only pytest's own success is one: code that ends the process with 0 in the middle of the tests has not passed."""
    if result.exit_code == 0:
        return ToolResult(f"ok: {sum(outcome == 'passed' for outcome in result.tests.values())} passed")
    if result.exit_code == 5:
        return ToolResult("no tests ran")
    raise ToolError(
        "unexpected_environment", f"tests ended early, {result.limit or 'exit'} {result.exit_code}"
    )


def _describe(failure: Any) -> str:
    name = failure.nodeid.rsplit("::", 1)[-1]
    inside = failure.path and failure.line and not failure.path.startswith("/")
    place = f"{failure.path}:{failure.line}" if inside else None
    return f"{name}: {failure_line(failure.message, failure.source, place)}"
