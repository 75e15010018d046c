"""Looking at runs while they go on. Reads what they write, and can neither slow nor stop them (invariant 10).

Start with ``live_report`` and ``serve``.
"""

from cadenza.observe.live import live_report, run_info
from cadenza.observe.server import serve

__all__ = ["live_report", "run_info", "serve"]
