"""A canary that lets a damaged policy stay, takes a good one back, or changes whom a user meets."""

from __future__ import annotations

import dataclasses
import random

import pytest

from cadenza.core.errors import RolloutFailure
from cadenza.core.types import Rollout, Verdict
from cadenza.realtime import Canary, CanaryConfig, FeedbackRewards, ServedPolicy, judge
from cadenza.realtime.users import UserConfig, react, user_of

USERS = UserConfig()


def rollout(number: int, solved: bool, **changes) -> Rollout:
    made = Rollout(
        id=f"r{number}", group_id="g", task_id=f"task{number}", segments=[], trace=[], patch="diff", rewards={},
        verdict=Verdict(float(solved)), reward=None, status="finished", timings={}, seed=0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def watch(good: dict[str, float], seed: int, answers: int = 400) -> Canary:
    """Users meet two policies that solve these shares of their tasks, until the canary decides."""
    canary, rng = Canary(CanaryConfig(), f"run/{seed}"), random.Random(seed)
    for number in range(answers):
        user = user_of(f"task{number}", USERS)
        arm, chance = canary.arm_of(user)
        policy = ServedPolicy(model="rl", version=1, arm=arm, propensity=chance)
        events = react(rollout(number, rng.random() < good[arm]), policy, USERS, seed)
        if canary.observe(policy, events) != "watching":
            return canary
    return canary


def test_a_damaged_policy_stays_or_is_taken_back_late():
    watched = [watch({"serving": 0.7, "canary": 0.0}, seed) for seed in range(20)]
    assert all(c.state == "rolled_back" and "users took" in c.reason for c in watched)
    early = [c for c in watched if min(c.answers.values()) < c.config.enough]
    assert len(early) >= 14, [c.answers for c in watched]


def test_an_equal_or_better_policy_is_taken_back_early_more_often_than_allowed():
    states = [watch({"serving": 0.7, "canary": 0.72}, seed) for seed in range(40)]
    early = [c for c in states if c.state == "rolled_back" and min(c.answers.values()) < c.config.enough]
    assert len(early) <= 2
    assert sum(c.state == "passed" for c in states) >= 24  # at the end the shares decide, which are noisy


def test_a_user_meets_the_other_policy_the_next_time_or_all_meet_one():
    canary = Canary(CanaryConfig(share=0.25), "a")
    arms = {f"u{i}": canary.arm_of(f"u{i}") for i in range(4000)}
    assert all(canary.arm_of(user) == arm for user, arm in arms.items())
    share = sum(arm == "canary" for arm, _ in arms.values()) / len(arms)
    assert share == pytest.approx(0.25, abs=0.03)
    assert {chance for arm, chance in arms.values() if arm == "canary"} == {0.25}
    other = Canary(CanaryConfig(share=0.25), "b")
    assert any(other.arm_of(user) != arm for user, arm in arms.items())


def test_a_decision_is_changed_afterwards():
    canary = watch({"serving": 0.9, "canary": 0.0}, 1)
    kept = (canary.state, canary.reason, dict(canary.answers))
    policy = ServedPolicy(model="rl", version=1, arm="canary", propensity=0.5)
    canary.observe(policy, react(rollout(999, True), policy, USERS, 0))
    assert (canary.state, canary.reason, canary.answers) == kept


def test_users_of_a_better_policy_give_less_reward():
    policy = ServedPolicy(model="rl", version=1)
    means = []
    for solved in (False, True):
        events = [e for n in range(200) for e in react(rollout(n, solved), policy, USERS, 0)]
        judged = judge(events, FeedbackRewards())
        means.append(sum(judged.rewards.values()) / len(judged.rewards))
        assert 0 < judged.shares()["abstained"] < 0.2 and judged.shares()["withheld"] < 0.2
    assert means[0] < -0.2 < 0.6 < means[1]


def test_an_answer_that_was_never_shown_has_feedback():
    lost = Verdict(None, RolloutFailure("sandbox_gone", "x", retry=True, counts=False))
    policy = ServedPolicy(model="rl", version=1)
    assert react(rollout(1, False, verdict=lost), policy, USERS, 0) == []
    canary = Canary(CanaryConfig(), "a")
    canary.observe(policy, [])
    assert canary.answers == {"serving": 0, "canary": 0}
    first = react(rollout(1, True), policy, USERS, 0)
    assert first == react(rollout(1, True), policy, USERS, 0) != react(rollout(1, True), policy, USERS, 1)
    questions = react(rollout(2, False, patch=""), policy, USERS, 0)
    assert questions[0].kind == "question.asked"
    own = Verdict(None, RolloutFailure("patch_refused", "x", retry=False, counts=True))
    assert react(rollout(4, False, verdict=own), policy, USERS, 0)[0].kind == "edit.shown"
    assert not {e.event_id for e in first} & {
        e.event_id for e in react(rollout(1, True), policy, USERS, 0, "later")
    }
    trace = [{"broken": "no_end"}, {"error_kind": "invalid_arguments"}, {"error_kind": "not_found"}]
    events = react(rollout(3, False, trace=trace), policy, USERS, 0)
    assert (events[0].kind, events[0].payload) == ("tool.invalid", {"count": 2})
