"""The tool library: looks a call up, runs it, and turns every failure into a typed result the model can read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from cadenza.core.errors import CadenzaError
from cadenza.harness.tools.base import Tool, ToolError, ToolResult
from cadenza.harness.tools.finish import Finish
from cadenza.harness.tools.grep import Grep
from cadenza.harness.tools.list_dir import ListDir
from cadenza.harness.tools.read_file import ReadFile
from cadenza.harness.tools.replace_def import ReplaceDef
from cadenza.harness.tools.run_tests import RunTests
from cadenza.harness.tools.todo_write import TodoWrite
from cadenza.sandbox.errors import PathRefused, SandboxGone
from cadenza.tokens import Call


class ToolLibrary:
    """Tools by name. ``run`` raises only what stops a trial: a lost or silent sandbox, cancellation."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        usage = "\n".join(f"{tool.name}:{tool.usage}" for tool in self._tools.values())
        #: Names the tools and their usage; goes into ``Segment.digests["tools"]``.
        self.digest: str = hashlib.sha256(usage.encode()).hexdigest()[:16]

    @property
    def names(self) -> tuple[str, ...]:
        """Names a call may have, in the order they were given."""
        return tuple(self._tools)

    async def run(self, call: Call, sandbox: Any) -> ToolResult:
        """Dispatches one call. Raises SandboxGone or CadenzaError when the sandbox died under the tool."""
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(f"error: no tool {call.name[:40]}", "unknown_tool")
        try:
            return await tool(sandbox, call)
        except ToolError as error:
            return ToolResult(f"error: {error}" if str(error) else f"error: usage: {tool.usage}", error.kind)
        except (SandboxGone, CadenzaError):  # the world failed, not the call: never shown to the model
            raise
        except (FileNotFoundError, NotADirectoryError):
            return ToolResult("error: no such file", "not_found")
        except IsADirectoryError:
            return ToolResult("error: is a folder", "not_found")
        except (PermissionError, PathRefused):
            return ToolResult("error: refused", "refused")
        except TimeoutError:
            return ToolResult("error: timeout", "timeout")
        except Exception as error:  # whatever a tool did not foresee is a typed result, counted in the trace
            reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
            return ToolResult(f"error: {reason}"[:80], "unexpected_environment")


def demo_tools(*, test_timeout_s: float = 2.0) -> ToolLibrary:
    """The tools of the demo agent."""
    tests = RunTests(timeout_s=test_timeout_s)
    return ToolLibrary([ListDir(), ReadFile(), Grep(), ReplaceDef(), tests, TodoWrite(), Finish()])
