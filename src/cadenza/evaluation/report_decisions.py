"""What gate and canary decided, as cards that say what came of it and why."""

from __future__ import annotations

from dataclasses import dataclass

from cadenza.evaluation.comparison import label
from cadenza.evaluation.report_inputs import DAMAGED, DecisionRecord

# What the policies of a real-time round are; every other policy has the name of the stage that made it.
ROLES = {
    "candidate": "Candidate: the served policy, trained on what users did in this round.",
    DAMAGED: "Damaged: the served policy with noise on its weights, made to see whether the guards stop it.",
}
_MARKS = {True: ("✓", "passed"), False: ("✗", "failed"), None: ("–", "not decided")}


@dataclass(frozen=True)
class Check:
    """One reason. ``mark`` and ``word`` say the same, for the eye and for a screen reader; ``tone``: good | bad |
    open."""

    mark: str
    word: str
    tone: str
    text: str


@dataclass(frozen=True)
class Card:
    """One decision. ``chip``: the outcome in a word or two; ``outcome``: what came of it; ``role``: what the policy is,
    "" where its name says it; ``tone``: good | bad | open."""

    stage: str
    guard: str
    policy: str
    against: str
    chip: str
    tone: str
    outcome: str
    role: str
    drill: bool
    checks: tuple[Check, ...]


def card(d: DecisionRecord) -> Card:
    """The card of one decision. Of a drill, what stops the policy is the good outcome."""
    drill = d.policy == DAMAGED
    stopped = d.outcome in ("refused", "rolled_back")
    undecided = d.outcome == "watching"
    checks = []
    for good, text in d.reasons:
        mark, word = _MARKS[None if undecided else good]
        checks.append(Check(mark, word, "open" if undecided else "good" if good else "bad", text))
    return Card(
        stage=d.stage,
        guard=d.guard,
        policy=d.policy,
        against="the policy that is served" if d.against == "serving" else label(d.against),
        chip="too few answers" if undecided else d.outcome.replace("_", " "),
        tone="open" if undecided else "good" if stopped == drill else "bad",
        outcome=_drill_outcome(d.outcome) if drill else _outcome(d),
        role=ROLES.get(d.policy, ""),
        drill=drill,
        checks=tuple(checks),
    )


def _outcome(d: DecisionRecord) -> str:
    if d.guard == "canary":
        return "It serves all users now." if d.outcome == "passed" else "The old policy stays."
    if d.outcome == "refused":
        return "What was served before stays." if d.against else "Nothing is served."
    if d.policy == "candidate":
        return "Some users may meet it now: the canary."
    return (
        "It is served now." if d.against else "It is served now; nothing was before, so it met no comparison."
    )


def _drill_outcome(outcome: str) -> str:
    if outcome == "watching":
        return "The drill shows nothing: too few users met it. It is not served."
    return "As it should be." if outcome in ("refused", "rolled_back") else "The guard let it through."
