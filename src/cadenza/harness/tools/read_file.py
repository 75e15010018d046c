"""read_file: a file as it is."""

from __future__ import annotations

from typing import Any

from cadenza.harness.tools.base import ToolError, ToolResult, line_number, no_body, positional, short_path
from cadenza.tokens import Call


class ReadFile:
    """``read_file PATH`` -> its text. ``read_file PATH N`` begins at line N, for long files.

    Without line numbers: what a model reads is what it writes back with ``replace_def``.
    """

    name = "read_file"
    usage = "read_file PATH [FIRST_LINE]"

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        path, *start = positional(call, 1, 2)
        no_body(call)
        first = line_number(start[0]) if start else 1
        data = await sandbox.read(short_path(path))
        if b"\0" in data:
            raise ToolError("refused", f"{path} is binary")
        lines = text_lines(data)
        if start and first > len(lines):
            raise ToolError("not_found", f"{path} has {len(lines)} lines")
        return ToolResult("\n".join(lines[first - 1 :]) if lines else "empty")


def text_lines(data: bytes) -> list[str]:
    """Lines of a file as shown: split at LF only, a CR before it hidden, undecodable bytes as U+FFFD."""
    lines = data.decode("utf-8", "replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]
