"""list_dir: every file of the working folder on one line."""

from __future__ import annotations

from typing import Any

from cadenza.harness.tools.base import ToolResult, no_body, positional
from cadenza.tokens import Call

# Written by Python and pytest, never by the author of a repository.
_LITTER = ("__pycache__", ".pytest_cache", ".git")


class ListDir:
    """``list_dir`` -> ``a.py b/c.py test_a.py``; at most ``most`` names, then ``+N more``."""

    name = "list_dir"
    usage = "list_dir"

    def __init__(self, most: int = 40) -> None:
        self.most = most

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        positional(call, 0, 0)
        no_body(call)
        names = [name for name in await sandbox.list(".") if not is_litter(name)]
        more = f" +{len(names) - self.most} more" if len(names) > self.most else ""
        return ToolResult(" ".join(names[: self.most]) + more if names else "empty")


def is_litter(path: str) -> bool:
    """Whether a path is a by-product of running the code and no part of the work."""
    return path.endswith(".pyc") or any(part in _LITTER for part in path.split("/"))
