"""The tools of the agent, one file each."""

from cadenza.harness.tools.base import ERROR_KINDS, Tool, ToolError, ToolResult
from cadenza.harness.tools.library import ToolLibrary, demo_tools

__all__ = ["ERROR_KINDS", "Tool", "ToolError", "ToolLibrary", "ToolResult", "demo_tools"]
