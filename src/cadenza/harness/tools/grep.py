"""grep: lines that match a pattern, in every file of the working folder."""

from __future__ import annotations

from typing import Any

from cadenza.harness.tools.base import ToolError, ToolResult, no_body, positional
from cadenza.tokens import Call


class Grep:
    """``grep PATTERN`` -> ``path:N|text``, at most ``most`` lines, then ``+N more``.

    Runs inside the sandbox: a pattern written by a model may take exponential time. Basic regular expressions, in
    which ``total(`` is what it looks like. A path is always given and stdin is closed, since grep would otherwise wait
    for text on stdin; ``-e`` guards a leading dash; exit 1 is "no match" and 2 an error.
    """

    name = "grep"
    usage = "grep PATTERN"

    def __init__(self, most: int = 6, timeout_s: float = 5.0) -> None:
        self.most = most
        self.timeout_s = timeout_s

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        (pattern,) = positional(call, 1, 1)
        no_body(call)
        if "\0" in pattern:
            raise ToolError("invalid_arguments", "bad pattern")
        argv = ["grep", "-rnI", "--exclude-dir=__pycache__", "--exclude-dir=.git", "-e", pattern, "--", "."]
        result = await sandbox.exec(argv, timeout_s=self.timeout_s, env={"LC_ALL": "C.UTF-8"})
        if result.timed_out:
            raise ToolError("timeout", "timeout")
        if result.rc == 1:
            return ToolResult("no match")
        if result.rc != 0:
            raise ToolError("invalid_arguments", "bad pattern")
        hits = sorted(_hits(result.stdout.decode("utf-8", "replace")))
        more = [f"+{len(hits) - self.most} more"] if len(hits) > self.most else []
        return ToolResult("\n".join([f"{path}:{n}|{text}" for path, n, text in hits[: self.most]] + more))


def _hits(stdout: str) -> list[tuple[str, int, str]]:
    hits = []
    for line in stdout.split("\n"):
        path, _, rest = line.partition(":")
        number, colon, text = rest.partition(":")
        if colon and number.isdigit():
            hits.append((path.removeprefix("./"), int(number), text.removesuffix("\r")))
    return hits
