"""A round of learning from use: what users did, counted by who answered them, and what became of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.evaluation.report_decisions import card
from cadenza.evaluation.report_inputs import DAMAGED, DRILL, ROUND, DecisionRecord, StageInfo

# (column, the kinds of events that count there); an answer counts once in a column, however often it happened.
COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("edit shown", ("edit.shown",)),
    ("accepted", ("edit.accepted", "edit.modified")),
    ("in part", ("edit.partial",)),
    ("rejected", ("edit.rejected",)),
    ("undone", ("edit.undone",)),
    ("follow-up", ("message.followup",)),
    ("question", ("question.asked",)),
    ("invalid call", ("tool.invalid",)),
    ("broken off", ("turn.interrupted",)),
)


@dataclass(frozen=True)
class Asked:
    """One policy on one occasion. ``answers``: that its users got; ``counts``: of them, in the order of ``COLUMNS``."""

    title: str
    answers: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """``asked``: rows of the table. ``facts``: (name, what came of it), of what has happened by now."""

    stage: str
    asked: tuple[Asked, ...]
    facts: tuple[tuple[str, str], ...]


def rounds(
    feedback: Mapping[str, Sequence[Mapping[str, Any]]],
    decisions: Sequence[DecisionRecord],
    stages: Sequence[StageInfo],
) -> list[Round]:
    """The rounds of a run. ``feedback``: events in the format ``feedback/1`` by stage."""
    details = {stage.name: stage.detail for stage in stages}
    return [
        Round(
            stage, _asked(events), _facts([d for d in decisions if d.stage == stage], details.get(stage, {}))
        )
        for stage, events in feedback.items()
    ]


def _asked(events: Sequence[Mapping[str, Any]]) -> tuple[Asked, ...]:
    """A row for each occasion and arm. An event's trajectory is named OCCASION/ARM-VERSION/ROLLOUT."""
    kinds: dict[tuple[str, str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for event in events:
        policy, trajectory = event["policy"], event["trajectory_id"]
        occasion = trajectory.partition(f"/{policy['arm']}-{policy['version']}/")[0]
        kinds[occasion, policy["arm"], policy["model"]][trajectory].add(event["kind"])
    rows = []
    for (occasion, arm, model), answers in kinds.items():
        drill = f"/{DRILL}/" in occasion
        what = "learned from" if occasion == ROUND else "drill" if drill else "canary"
        name = "served policy" if arm == "serving" else f"{model} policy" if model == DAMAGED else model
        counts = tuple(sum(bool(seen & set(of)) for seen in answers.values()) for _, of in COLUMNS)
        rows.append((what, arm, Asked(f"{name.capitalize()}, {what}", len(answers), counts)))
    rank = {"learned from": 0, "canary": 1, "drill": 2}
    return tuple(row for _, _, row in sorted(rows, key=lambda r: (rank[r[0]], r[1] != "canary")))


def _facts(decisions: Sequence[DecisionRecord], detail: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    facts = []
    if "share_rewarded" in detail:
        others = (
            ("without a label", "abstained"),
            ("broken off", "excluded"),
            ("without consent", "withheld"),
        )
        rest = ", ".join(f"{told} {100 * detail.get(f'share_{key}', 0):.0f}%" for told, key in others)
        facts.append(("Answers rewarded", f"{100 * detail['share_rewarded']:.0f}% ({rest})"))
    if "mean_reward" in detail:
        facts.append(("Mean reward", f"{detail['mean_reward']:+.2f}, between −1 and +1".replace("-", "−")))
    drills = [d for d in decisions if d.policy == DAMAGED]
    for d in decisions:
        if d not in drills:
            facts.append((d.guard.capitalize(), f"{card(d).chip}. {card(d).outcome}"))
    if "deployed" in detail:
        facts.append(("Served now", "the candidate" if detail["deployed"] else "the old policy"))
    if drills:
        told = "; ".join(f"{d.guard}: {card(d).chip}" for d in drills)
        facts.append(("Drills (damaged policy)", told))
    elif "deployed" in detail:
        facts.append(("Drills (damaged policy)", "not run: damage is 0"))
    return tuple(facts)
