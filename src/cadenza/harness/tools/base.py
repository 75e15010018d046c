"""What a tool is: a name, a usage line, and an async call that answers with text or a typed error.

Error kinds (the taxonomy of every tool result):
``unknown_tool``, ``invalid_arguments`` (the call does not fit the usage line), ``not_found`` (path, line or definition
that does not exist), ``refused`` (outside the working folder, binary file), ``timeout``, ``no_effect`` (the call was
valid and changed nothing), ``unexpected_environment`` (anything the tool did not foresee). A failing test is no error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cadenza.tokens import Call

ERROR_KINDS = (
    "unknown_tool", "invalid_arguments", "not_found", "refused", "timeout", "no_effect", "repeated",
    "unexpected_environment",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model reads, and whether the run is over. ``edited``: a path that the call has changed. ``todos``: what
    is open on the model's list from now on, None where the call says nothing about it."""

    text: str
    error_kind: str | None = None
    ends: bool = False
    edited: str | None = None
    todos: tuple[str, ...] | None = None


class ToolError(Exception):
    """Raised inside a tool; the library turns it into a ToolResult of that kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Sandbox(Protocol):
    """The part of a sandbox that tools use (``cadenza.sandbox`` provides it). Paths are relative to the work folder."""

    async def exec(
        self, argv: list[str], *, cwd: str = ..., timeout_s: float = ..., stdin: bytes = ..., env: Any = ...
    ) -> Any: ...

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def list(self, path: str = ...) -> list[str]: ...

    async def pytest(self, args: list[str], *, timeout_s: float = ...) -> Any: ...


class Tool(Protocol):
    """One tool. ``usage`` is shown to the model after a call that does not fit it."""

    name: str
    usage: str

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        """Runs the call. Raises ToolError, or whatever the sandbox raises."""
        ...


def positional(call: Call, least: int, most: int) -> list[str]:
    """The arguments of a call, separated by single spaces; the last one takes the rest of the line.

    Raises ToolError(invalid_arguments) when there are fewer than ``least``, more than ``most``, or an empty one.
    """
    parts = call.args.split(" ", most - 1) if call.args and most else ([call.args] if call.args else [])
    if not least <= len(parts) <= most or any(not part for part in parts):
        raise ToolError("invalid_arguments", "")
    return parts


def no_body(call: Call) -> None:
    """Refuses text after the first line for a tool that takes none."""
    if call.body:
        raise ToolError("invalid_arguments", "")


def line_number(text: str) -> int:
    """A line number from 1; ToolError(invalid_arguments) otherwise."""
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) > 0):
        raise ToolError("invalid_arguments", "")
    return int(text)


def short_path(path: str) -> str:
    """A path as the model may write it (``./a.py``) in the form the listing uses (``a.py``)."""
    while path.startswith("./"):
        path = path[2:]
    return path
