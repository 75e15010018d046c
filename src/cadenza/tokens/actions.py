"""What a turn of the model can be: a tool call, a closing message, or something broken."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class Call:
    """``NAME ARGS\\nBODY``. ``args`` is the rest of the first line; ``body`` is None when there is no newline."""

    name: str
    args: str = ""
    body: str | None = None
    think: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.match(self.name) or "\n" in self.args:
            raise ValueError(f"not a call: {self.name!r} {self.args!r}")

    def text(self) -> str:
        """The call as the model writes it."""
        head = f"{self.name} {self.args}" if self.args else self.name
        return head if self.body is None else f"{head}\n{self.body}"


@dataclass(frozen=True, slots=True)
class Final:
    """The closing message; it ends the run."""

    text: str
    think: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """What the model carries over into its next context, in answer to the harness's query."""

    text: str
    think: str | None = None


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A turn that is no action and is never dispatched. ``message`` is short: the model reads it.

    ``kind``: ``no_role`` (does not begin with a role token), ``no_end``, ``stray_special`` (a special token inside the
    text), ``trailing`` (tokens after the end), ``not_utf8``, ``bad_name``, ``two_thoughts``.
    """

    kind: str
    message: str


Action = Call | Final


@dataclass(frozen=True, slots=True)
class Parsed:
    """Result of parsing one sampled turn. ``think`` is the thought, also of a broken turn."""

    action: Call | Final | BrokenCall
    think: str | None = None


def parse_call(text: str) -> Call | BrokenCall:
    """Reads ``NAME ARGS\\nBODY``. Whether the tool exists and the arguments fit is the tool library's to say."""
    head, newline, body = text.partition("\n")
    name, _, args = head.partition(" ")
    if not _NAME.match(name):
        return BrokenCall("bad_name", "no tool name")
    return Call(name, args, body if newline else None)
