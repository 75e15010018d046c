"""edit_line: replaces one line by any number of lines, byte-exact everywhere else."""

from __future__ import annotations

from typing import Any

from cadenza.harness.tools.base import ToolError, ToolResult, line_number, positional, short_path
from cadenza.tokens import Call

_MOST_SHOWN = 6


class EditLine:
    """``edit_line PATH LINE\\nNEW TEXT`` replaces line LINE; an empty NEW TEXT deletes it.

    Answers ``ok``, because the model has just written the line itself. When the number of lines changed, so that
    numbers the model has read are stale, it shows the new neighbourhood instead.
    """

    name = "edit_line"
    usage = "edit_line PATH LINE, then the new text on the next line"

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        path, number_text = positional(call, 2, 2)
        if call.body is None:
            raise ToolError("invalid_arguments", "")
        path, number = short_path(path), line_number(number_text)
        before = await sandbox.read(path)
        after, shown = replace_line(before, number, call.body)
        if after == before:
            return ToolResult("error: unchanged", "no_effect")
        await sandbox.write(path, after)
        return ToolResult("\n".join(shown) if shown else "ok")


def replace_line(data: bytes, number: int, text: str) -> tuple[bytes, list[str]]:
    """Replaces line ``number`` (from 1) of ``data`` by ``text``, keeping the line's own ending, CRLF or LF.

    Returns the new bytes and, when the number of lines changed, the neighbourhood as ``N|text``. Raises
    ToolError(not_found) for a line that does not exist.
    """
    lines = data.split(b"\n")
    count = len(lines) - (lines[-1] == b"")
    if number > count:
        raise ToolError("not_found", f"no line {number}, last is {count}")
    ending = b"\r" if lines[number - 1].endswith(b"\r") else b""
    new = [line.removesuffix("\r").encode() + ending for line in text.split("\n")] if text else []
    if not new and number == count and lines[-1] != b"" and count > 1:
        lines[number - 2] = lines[number - 2].removesuffix(
            b"\r"
        )  # the new last line had no line ending before it
    lines[number - 1 : number] = new
    if len(new) == 1:
        return b"\n".join(lines), []
    first, last = max(number - 1, 1), min(number + len(new), count - 1 + len(new))
    texts = [line.decode("utf-8", "replace").removesuffix("\r") for line in lines[first - 1 : last]]
    shown = [f"{n}|{line}" for n, line in enumerate(texts, first)][:_MOST_SHOWN]
    return b"\n".join(lines), shown or ["ok"]
