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

    def __init__(self, most: int = 2, timeout_s: float = 5.0) -> None:
        self.most = most
        self.timeout_s = timeout_s

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        positional(call, 0, 0)
        no_body(call)
        result = await sandbox.pytest([], timeout_s=self.timeout_s)
        if result.timed_out:
            raise ToolError("timeout", "tests ran too long")
        bad = [test for test, outcome in result.tests.items() if outcome in ("failed", "error")]
        if not bad and not result.failures:
            passed = sum(outcome == "passed" for outcome in result.tests.values())
            return ToolResult(f"ok: {passed} passed" if passed else "no tests ran")
        lines = [_describe(failure) for failure in result.failures[: self.most]]
        hidden = max(len(bad), len(result.failures)) - len(lines)
        return ToolResult("\n".join(lines + ([f"+{hidden} more"] if hidden else [])))


def _describe(failure: Any) -> str:
    name = failure.nodeid.rsplit("::", 1)[-1]
    inside = failure.path and failure.line and not failure.path.startswith("/")
    place = f"{failure.path}:{failure.line}" if inside else None
    return f"{name}: {failure_line(failure.message, failure.source, place)}"
