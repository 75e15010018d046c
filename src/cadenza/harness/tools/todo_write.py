"""todo_write: the model's own list of what is left to do, which stays with it when it goes on in another context."""

from __future__ import annotations

from typing import Any

from cadenza.harness.tools.base import ToolError, ToolResult, positional
from cadenza.tokens import Call

OPEN, DONE = "- ", "x "
MOST_ITEMS, MOST_CHARACTERS = 12, 80


class TodoWrite:
    """``todo_write\\n- ITEM\\nx ITEM`` replaces the list: an item a line, ``-`` open and ``x`` done. Without a list it
    empties it. Answers how many are open."""

    name = "todo_write"
    usage = "todo_write, then one item a line from the next line on: - open, x done"

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        positional(call, 0, 0)
        lines = [line.rstrip() for line in (call.body or "").splitlines() if line.strip()]
        if any(line[:2] not in (OPEN, DONE) or not line[2:].strip() for line in lines):
            raise ToolError("invalid_arguments", "")
        if len(lines) > MOST_ITEMS or any(len(line) > MOST_CHARACTERS for line in lines):
            raise ToolError(
                "invalid_arguments", f"at most {MOST_ITEMS} items of {MOST_CHARACTERS} characters"
            )
        left = tuple(line[2:].strip() for line in lines if line.startswith(OPEN))
        return ToolResult(f"{len(left)} open", todos=left)
