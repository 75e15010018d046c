from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from cadenza.core.errors import RolloutFailure
from cadenza.core.types import Segment, Verdict
from cadenza.harness.tools import ERROR_KINDS
from cadenza.rewards import LengthPenalty, RewardConfig, reward
from cadenza.rewards.outcome import CallError, length_cost


def segment(*kinds: int) -> Segment:
    count = len(kinds)
    return Segment(
        kind="act",
        ids_T=np.zeros(count, np.int32),
        sampled_T=np.zeros(count, np.bool_),
        token_kind_T=np.asarray(kinds, np.int8),
        logprob_S=np.zeros(0, np.float32),
        version_S=np.zeros(0, np.int32),
        turns=[(0, count)],
        finish_reason="finish",
        sampling={},
        digests={},
    )


TRACE = [{"turn": 0}, {"summary": {"broken": 2, "tools": {"grep": {"calls": 3}}}}]


def failed(kind: str, counts: bool) -> Verdict:
    return Verdict(None, RolloutFailure(kind, "", retry=not counts, counts=counts))


def test_an_infrastructure_failure_never_becomes_a_number():
    assert reward(failed("sandbox_gone", False), [], [], "error", RewardConfig()) == ({}, None)


def test_the_models_own_failure_is_scored_by_the_table():
    config = RewardConfig(failures={"patch_refused": -0.5})
    assert reward(failed("patch_refused", True), [], [], "finish", config) == ({"outcome": -0.5}, -0.5)
    assert reward(failed("other", True), [], [], "finish", config) == ({"outcome": 0.0}, 0.0)


def test_a_score_is_scaled_between_failed_and_solved():
    config = RewardConfig(solved=2.0, failed=-1.0)
    assert reward(Verdict(1.0), [], [], "finish", config)[1] == 2.0
    assert reward(Verdict(0.0), [], [], "finish", config)[1] == -1.0


def test_an_unfinished_run_is_worth_what_the_config_says():
    assert reward(Verdict(1.0), [], [], "context", RewardConfig())[1] == 1.0
    assert reward(Verdict(1.0), [], [], "context", RewardConfig(unfinished=0.25))[1] == 0.25
    assert reward(Verdict(1.0), [], [], "finish", RewardConfig(unfinished=0.25))[1] == 1.0


def test_each_reward_has_its_name():
    config = RewardConfig(broken_call=-0.1, length=LengthPenalty(scale=0.001))
    named, total = reward(Verdict(1.0), [segment(0, 2, 3)], TRACE, "finish", config)
    assert set(named) == {"outcome", "broken_calls", "length"}
    assert named["broken_calls"] == pytest.approx(-0.2) and named["length"] < 0
    assert total == pytest.approx(sum(named.values()))


def test_behaviours_that_are_watched_cost_nothing_until_they_are_priced():
    trace = [{"summary": {"broken": 1, "open_todos": 2, "needless_reruns": 3}}]
    assert reward(Verdict(1.0), [], trace, "finish", RewardConfig()) == ({"outcome": 1.0}, 1.0)
    config = RewardConfig(broken_call=-0.1, open_todo=-0.05, needless_rerun=-0.01)
    named, total = reward(Verdict(1.0), [], trace, "finish", config)
    assert named == {
        "outcome": 1.0, "broken_calls": pytest.approx(-0.1), "open_todos": pytest.approx(-0.1),
        "needless_reruns": pytest.approx(-0.03),
    } and total == pytest.approx(0.77)  # fmt: skip
    named, _ = reward(Verdict(1.0), [], [{"summary": {"broken": 0}}], "finish", config)
    assert named["open_todos"] == 0.0, "a trace of before these were counted"


def test_calls_that_fail_cost_by_their_kind_and_no_other_counts():
    tools = {
        "replace_def": {"calls": 5, "errors": {"no_effect": 3, "not_found": 1, "unexpected_environment": 1}},
        "grep": {"calls": 1, "errors": {}},
        "read_file": {"calls": 2, "errors": {"no_effect": 1}},
    }
    trace = [{"turn": 0}, {"summary": {"broken": 0, "tools": tools}}]
    config = RewardConfig(call_errors={"no_effect": -0.05, "refused": -1.0})
    named, total = reward(Verdict(0.0), [], trace, "errors", config)
    assert named == {"outcome": 0.0, "call_errors": pytest.approx(-0.2)} and total == pytest.approx(-0.2)
    assert "call_errors" not in reward(Verdict(0.0), [], trace, "errors", RewardConfig())[0]


@pytest.mark.parametrize("kind", ["noeffect", "unexpected_environment", "invalid_arguments", "bad_name"])
def test_a_kind_that_is_misspelt_counted_as_broken_or_not_the_models_fault_is_refused(kind):
    with pytest.raises(ValidationError):
        RewardConfig.model_validate({"call_errors": {kind: -0.1}})


def test_the_kinds_that_may_cost_something_are_kinds_a_tool_answers():
    assert set(get_args(CallError)) < set(ERROR_KINDS)


def test_a_policy_is_paid_for_never_finishing():
    config = RewardConfig(false_finish=-0.4, unfinished=0.9)
    finished = reward(Verdict(1.0), [], [], "finish", config)[1]
    idle = reward(Verdict(1.0), [], [], "max_turns", config)[1]
    assert finished is not None and idle is not None and finished > idle


def test_saying_done_costs_only_the_run_that_is_not():
    config = RewardConfig(false_finish=-0.3)
    assert reward(Verdict(1.0), [], [], "finish", config) == ({"outcome": 1.0}, 1.0)
    assert reward(Verdict(0.5), [], [], "finish", config)[1] == pytest.approx(0.2)
    assert reward(Verdict(0.0), [], [], "max_turns", config) == ({"outcome": 0.0}, 0.0)
    assert reward(failed("patch_refused", True), [], [], "finish", config)[1] == pytest.approx(-0.3)


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError):
        reward(Verdict(1.0), [], [], "finish", RewardConfig(solved=math.inf))


@given(
    kinds=st.lists(st.integers(0, 4), max_size=200),
    k=st.floats(1e-4, 1.0),
    q=st.floats(0.0, 3.0),
)
@example(kinds=[], k=1.0, q=0.9999999999999999)
@example(kinds=[], k=1.0, q=1.0000000000000002)
def test_the_length_cost_is_finite_and_grows_with_every_counted_token(kinds, k, q):
    config = LengthPenalty(scale=1.0, k=k, q=q, per_call=2.0)
    cost = length_cost([segment(*kinds)], TRACE, config)
    more = length_cost([segment(*kinds, 2)], TRACE, config)
    assert math.isfinite(cost) and 0 <= cost < more


def test_a_price_that_is_bounded_goes_on_growing():
    config = LengthPenalty(scale=1.0, k=0.005, q=2.0)  # x / (1 + k x)
    costs = [length_cost([segment(*[2] * n)], [], config) for n in (200, 2_000, 200_000)]
    assert costs == pytest.approx([200 / 2, 2_000 / 11, 200_000 / 1_001]) and costs[-1] < 200


def test_the_prompt_is_free_and_calls_are_counted():
    config = LengthPenalty(scale=1.0, k=0.01, q=0.0, per_call=5.0, per_turn=1.0)
    # q = 0 makes the cost the weighted sum itself: 3 calls at 5 and one turn.
    assert length_cost([segment(0, 0, 0)], TRACE, config) == pytest.approx(16.0)
    assert length_cost([segment(1, 2, 3, 3, 4)], TRACE, config) == pytest.approx(16.0 + 3.5)


def test_a_failed_run_pays_for_its_length_although_only_solved_ones_should():
    config = RewardConfig(length=LengthPenalty(scale=0.01, solved_only=True))
    for score, pays in ((1.0, True), (0.5, False), (0.0, False)):
        verdict = Verdict(score)
        named, total = reward(verdict, [segment(1, 2, 3)], TRACE, "finish", config)
        assert ("length" in named) == pays and (total == score) == (not pays)
