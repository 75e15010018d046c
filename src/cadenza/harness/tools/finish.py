"""finish: the model says that it is done."""

from __future__ import annotations

from typing import Any

from cadenza.harness.tools.base import ToolResult, no_body, positional
from cadenza.tokens import Call


class Finish:
    """``finish`` ends the run; nothing is sampled after it."""

    name = "finish"
    usage = "finish"

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        positional(call, 0, 0)
        no_body(call)
        return ToolResult("", ends=True)
