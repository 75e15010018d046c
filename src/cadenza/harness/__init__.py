"""The agent: one loop and its tools. The same code serves users and trains."""

from cadenza.harness.agent import Agent, AgentResult
from cadenza.harness.limits import Limits, limits_of, save_limits
from cadenza.harness.tools import ToolLibrary, demo_tools

__all__ = ["Agent", "AgentResult", "Limits", "ToolLibrary", "demo_tools", "limits_of", "save_limits"]
