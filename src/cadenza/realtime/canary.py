"""The canary: a promoted policy meets a few users first, and is taken back as soon as they are worse off.

Users keep their arm: who they meet is a function of who they are. What is watched is the share of answers that were
taken. It is looked at after every ten answers, so the test has to hold at every look: its bound is widened for all at
once (a union bound over Hoeffding's inequality; Hoeffding 1963), which makes it late by some answers, and too early no
more often than it says. In the end the shares themselves decide.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.realtime.feedback import FeedbackEvent, ServedPolicy

EVERY = 10  # answers from one look to the next
TAKEN = ("edit.accepted", "edit.partial", "edit.modified")


class CanaryConfig(StrictConfig):
    """``share``: of users who meet the candidate. ``margin``: by how much the share of taken answers may fall.
    ``risk``: of taking a policy back early that is within the margin. ``least``: answers of each arm before anything is
    decided. ``enough``: answers of each arm after which it is served to all, or taken back."""

    share: float = Field(default=0.5, gt=0, lt=1)
    margin: float = Field(default=0.1, ge=0)
    risk: float = Field(default=0.05, gt=0, lt=1)
    least: int = Field(default=10, gt=0)
    enough: int = Field(default=60, gt=0)


@dataclass
class Canary:
    """Watches one candidate. ``state``: watching | passed | rolled_back; it never leaves the last two."""

    config: CanaryConfig
    salt: str
    state: str = "watching"
    reason: str = ""
    taken: dict[str, int] = field(default_factory=lambda: {"serving": 0, "canary": 0})
    answers: dict[str, int] = field(default_factory=lambda: {"serving": 0, "canary": 0})

    def arm_of(self, user_hash: str) -> tuple[str, float]:
        """(serving or canary, the chance of it) for a user, always the same while this canary is watched."""
        digest = hashlib.blake2b(f"{self.salt}/{user_hash}".encode(), digest_size=8).digest()
        chosen = int.from_bytes(digest, "big") / 2**64 < self.config.share
        return ("canary", self.config.share) if chosen else ("serving", 1.0 - self.config.share)

    def observe(self, policy: ServedPolicy, events: list[FeedbackEvent]) -> str:
        """Counts one answer and decides; returns the state. An answer that its user broke off is not counted, nor one
        without any event: it was never shown."""
        kinds = {event.kind for event in events}
        if self.state != "watching" or not kinds or "turn.interrupted" in kinds:
            return self.state
        self.answers[policy.arm] += 1
        self.taken[policy.arm] += bool(kinds & set(TAKEN))
        complete = min(self.answers.values()) >= self.config.enough
        due = sum(self.answers.values()) % EVERY == 0 or complete
        if not due or min(self.answers.values()) < self.config.least:
            return self.state
        new, old = (self.taken[arm] / self.answers[arm] for arm in ("canary", "serving"))
        if old - new - self.config.margin > self.bound():
            self.state = "rolled_back"
        elif complete:
            self.state = "passed" if old - new <= self.config.margin else "rolled_back"
        if self.state != "watching":
            self.reason = (
                f"users took {new:.0%} of {self.answers['canary']} answers, and {old:.0%} of "
                f"{self.answers['serving']} of the policy that is served"
            )
        return self.state

    def told(self) -> str:
        """Why it has decided, or what it lacks to decide, as a sentence."""
        few, enough = self.answers, max(self.config.least, self.config.enough)
        return self.reason or (
            f"too few answers to decide: {few['canary']}, and {few['serving']} of the policy that is served, "
            f"where {enough} of each are asked for"
        )

    def bound(self) -> float:
        """How far the difference of two shares may lie from the truth, at every look with a chance of 1 - ``risk``."""
        share = self.config.share
        looks = math.ceil(
            2 * self.config.enough / min(share, 1.0 - share) / EVERY
        )  # twice of what is expected
        variance = sum(1.0 / n for n in self.answers.values()) / 4.0
        return math.sqrt(2.0 * variance * math.log(looks / self.config.risk))
