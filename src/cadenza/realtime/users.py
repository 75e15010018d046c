"""Simulated users: each wants a task done, looks at what was proposed, and does what people do.

They know the outcome of the hidden tests, as somebody does who tries the change, and err in both directions. The policy
and the trainer see their events and nothing else.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.types import Rollout
from cadenza.evaluation.report_inputs import ROUND
from cadenza.realtime.feedback import FeedbackEvent, Kind, ServedPolicy

_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class UserConfig(StrictConfig):
    """Chances. ``accept_right``: of taking a change that solves the task; ``accept_wrong``: of taking one that does
    not. ``partial``: of taking only a part of it. ``undo``: of taking back a wrong one that was accepted. ``followup``:
    of saying so after a wrong one. ``silent``: of leaving without a word. ``interrupt``: of breaking off before the
    end. ``consent``: of allowing to train on it. ``users``: how many there are."""

    accept_right: float = Field(default=0.92, ge=0, le=1)
    accept_wrong: float = Field(default=0.15, ge=0, le=1)
    partial: float = Field(default=0.1, ge=0, le=1)
    undo: float = Field(default=0.5, ge=0, le=1)
    followup: float = Field(default=0.4, ge=0, le=1)
    silent: float = Field(default=0.08, ge=0, le=1)
    interrupt: float = Field(default=0.02, ge=0, le=1)
    consent: float = Field(default=0.95, ge=0, le=1)
    users: int = Field(default=50, gt=0)


def user_of(task_id: str, config: UserConfig) -> str:
    """Whose task it is: the same task is always the same user's."""
    digest = hashlib.blake2b(task_id.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") % config.users
    return hashlib.sha256(f"user-{number}".encode()).hexdigest()[:16]


def trajectory_id(rollout: Rollout, policy: ServedPolicy, occasion: str) -> str:
    """Of one answer: the same task may be asked on several occasions, and of several policies."""
    return f"{occasion}/{policy.arm}-{policy.version}/{rollout.id}"


def react(
    rollout: Rollout, policy: ServedPolicy, config: UserConfig, seed: int, occasion: str = ROUND
) -> list[FeedbackEvent]:
    """What the user does with one answer. The same rollout, policy, occasion and seed give the same events.

    A rollout that the infrastructure broke was never shown: it has no events. One that ended by the model's own failure
    was, and does not solve the task.
    """
    failure = rollout.verdict.failure
    if failure is not None and not failure.counts:
        return []
    right = rollout.verdict.score is not None and rollout.verdict.score >= 1.0
    name = trajectory_id(rollout, policy, occasion)
    rng = random.Random(f"{seed}/{name}")
    user = user_of(rollout.task_id, config)
    consent = random.Random(f"{seed}/consent/{user}").random() < config.consent
    at = _BEGIN + timedelta(seconds=rng.randrange(86_400))
    events: list[FeedbackEvent] = []

    def add(kind: Kind, minutes: float, **payload: object) -> None:
        when = (at + timedelta(minutes=minutes)).isoformat(timespec="seconds")
        event = FeedbackEvent(
            event_id=f"{name}/{len(events)}", ts=when, recv_ts=when,
            user_hash=user, consent=consent, session_id=name, trajectory_id=name, policy=policy,
            kind=kind, payload=payload,
        )  # fmt: skip
        events.append(event)

    invalid = _invalid_calls(rollout.trace)
    if invalid:
        add("tool.invalid", 0, count=invalid)
    if rollout.patch:
        add("edit.shown", 1)
    elif not invalid:
        add("question.asked", 1)
    if rng.random() < config.interrupt:
        add("turn.interrupted", 1)
    elif rollout.patch and rng.random() >= config.silent:
        _decide(rng, right, config, add)
    return events


def _decide(rng: random.Random, right: bool, config: UserConfig, add) -> None:
    if rng.random() >= (config.accept_right if right else config.accept_wrong):
        add("edit.rejected", 2)
        if not right and rng.random() < config.followup:
            add("message.followup", 3, correction=True)
        return
    if rng.random() < config.partial:
        add("edit.partial", 2, share=0.5)
    else:
        add("edit.accepted", 2, share=1.0)
    if right:
        add("edit.persisted", 60, share=1.0)
    elif rng.random() < config.undo:
        add("edit.undone", 20)


def _invalid_calls(trace: Sequence[dict]) -> int:
    return sum(e.get("error_kind") in ("unknown_tool", "invalid_arguments") or "broken" in e for e in trace)
