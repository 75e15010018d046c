"""From what users did to a reward a rollout, or to none.

Every answer gets a reward, or is counted as one that got none: a policy that learns which answers nobody judges would
give those (Cursor, "Improving Composer through real-time RL": broken tool calls that were left out of training, and
questions asked in the place of edits, were both learned). So invalid calls cost by themselves, and an answer without an
edit is worth ``no_edit`` and not nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cadenza.core.config import StrictConfig
from cadenza.realtime.feedback import FeedbackEvent

EXCLUDED = ("turn.interrupted",)


class FeedbackRewards(StrictConfig):
    """Weights. ``accepted``: of the share of the shown lines that was taken. ``persisted``: of the share still there
    later. ``rejected``: not taken. ``undone``: taken back. ``correction``: followed by a message that says it is still
    wrong. ``invalid``: a call that could not be carried out. ``no_edit``: an answer that changed nothing, a question
    too."""

    accepted: float = 1.0
    persisted: float = 0.25
    rejected: float = -0.5
    undone: float = -0.75
    correction: float = -0.5
    invalid: float = -0.25
    no_edit: float = -0.25


@dataclass
class Judged:
    """``rewards``: by trajectory, each in -1..1. ``abstained``: trajectories without a label, never trained on and
    always counted. ``excluded``: the infrastructure's or the user's own doing. ``withheld``: no consent."""

    rewards: dict[str, float] = field(default_factory=dict)
    abstained: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    withheld: list[str] = field(default_factory=list)

    def shares(self) -> dict[str, float]:
        """Of all trajectories: what an operator watches, since a denominator that shrinks is a policy that hides."""
        groups = {
            "rewarded": len(self.rewards),
            "abstained": len(self.abstained),
            "excluded": len(self.excluded),
            "withheld": len(self.withheld),
        }
        total = sum(groups.values())
        return {name: count / total for name, count in groups.items()} if total else {}


def judge(events: Iterable[FeedbackEvent], weights: FeedbackRewards) -> Judged:
    """Groups events by trajectory and gives each its reward, or says why it has none."""
    by_trajectory: dict[str, list[FeedbackEvent]] = defaultdict(list)
    for event in events:
        by_trajectory[event.trajectory_id].append(event)
    judged = Judged()
    for trajectory, group in by_trajectory.items():
        if not all(event.consent for event in group):
            judged.withheld.append(trajectory)
        elif any(event.kind in EXCLUDED for event in group):
            judged.excluded.append(trajectory)
        elif (reward := _reward(group, weights)) is None:
            judged.abstained.append(trajectory)
        else:
            judged.rewards[trajectory] = reward
    return judged


def behaviour(events: Iterable[FeedbackEvent]) -> dict[str, float]:
    """Per answer: how often it showed an edit, asked, or made an invalid call. A reward that can be gamed moves one of
    these before it moves anything that users say."""
    kinds = Counter[str]()
    trajectories = set()
    for event in events:
        kinds[event.kind] += 1
        trajectories.add(event.trajectory_id)
    n = len(trajectories)
    names = {"edit_rate": "edit.shown", "question_rate": "question.asked", "invalid_rate": "tool.invalid"}
    return {name: kinds[kind] / n for name, kind in names.items()} if n else {}


def baselines(rewards: Mapping[str, float], arms: Mapping[str, str]) -> dict[str, float]:
    """Mean reward by arm: with one answer a prompt there is no group to compare with. ``arms``: by trajectory."""
    groups: dict[str, list[float]] = defaultdict(list)
    for trajectory, reward in rewards.items():
        groups[arms[trajectory]].append(reward)
    return {arm: sum(values) / len(values) for arm, values in groups.items()}


def _reward(events: list[FeedbackEvent], w: FeedbackRewards) -> float | None:
    """None when nobody has said anything about it yet."""
    kinds = Counter(event.kind for event in events)
    total, labelled = 0.0, False
    for event in events:
        share = float(event.payload.get("share", 1.0))
        if event.kind in ("edit.accepted", "edit.partial", "edit.modified"):
            total, labelled = total + w.accepted * share, True
        elif event.kind == "edit.persisted":
            total, labelled = total + w.persisted * share, True
        elif event.kind == "edit.rejected":
            total, labelled = total + w.rejected, True
        elif event.kind == "edit.undone":
            total, labelled = total + w.undone, True
        elif event.kind == "message.followup" and event.payload.get("correction"):
            total, labelled = total + w.correction, True
        elif event.kind == "tool.invalid":
            total, labelled = total + w.invalid * float(event.payload.get("count", 1)), True
    if not kinds["edit.shown"]:
        total, labelled = total + w.no_edit, True
    return max(-1.0, min(1.0, total)) if labelled else None
