"""Learning from use: what users do with the served policy becomes reward, and the next one is tried on some of them.

Start with ``FeedbackLog`` and ``FeedbackRewards``.
"""

from cadenza.realtime.canary import Canary, CanaryConfig
from cadenza.realtime.feedback import FeedbackEvent, FeedbackLog, ServedPolicy
from cadenza.realtime.rewards import FeedbackRewards, Judged, judge

__all__ = [
    "Canary", "CanaryConfig", "FeedbackEvent", "FeedbackLog", "FeedbackRewards", "Judged", "ServedPolicy", "judge",
]  # fmt: skip
