"""What users did is kept once and whole, and every answer has a reward or is counted as one that has none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.core.errors import CorruptArtifact
from cadenza.realtime import FeedbackEvent, FeedbackLog, FeedbackRewards, ServedPolicy, judge
from cadenza.realtime.rewards import baselines, behaviour

POLICY = ServedPolicy(model="rl", version=3)


def event(
    kind: str, trajectory: str = "t", number: int = 0, consent: bool = True, **payload
) -> FeedbackEvent:
    return FeedbackEvent.model_validate(
        {
            "schema": "feedback/1", "event_id": f"{trajectory}/{kind}/{number}", "ts": "2026-01-01T00:00:00+00:00",
            "recv_ts": "2026-01-01T00:00:00+00:00", "user_hash": "u", "consent": consent, "session_id": "s",
            "trajectory_id": trajectory, "policy": POLICY.model_dump(), "kind": kind, "payload": payload,
        }
    )  # fmt: skip


def test_an_event_sent_twice_counts_twice(tmp_path):
    log = FeedbackLog(tmp_path / "feedback.jsonl")
    first, second = event("edit.shown"), event("edit.accepted")
    assert log.append([first, second, first]) == 2
    assert log.append([second]) == 0
    assert FeedbackLog(tmp_path / "feedback.jsonl").append([first]) == 0
    assert log.read() == [first, second]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_a_crash_cut_spoils_what_comes_after(tmp_path, cut):
    path = tmp_path / "feedback.jsonl"
    FeedbackLog(path).append([event("edit.shown"), event("edit.accepted")])
    path.write_bytes(path.read_bytes()[:-cut])
    log = FeedbackLog(path)
    assert log.read() == [event("edit.shown")]
    assert log.append([event("edit.accepted"), event("edit.rejected")]) == 2
    assert log.read() == [event("edit.shown"), event("edit.accepted"), event("edit.rejected")]


@pytest.mark.parametrize("longer", [0, 1, 60_000, 140_000])
def test_a_long_cut_line_takes_the_whole_log_with_it(tmp_path, longer):
    path = tmp_path / "feedback.jsonl"
    FeedbackLog(path).append([event("edit.shown")])
    with path.open("ab") as file:
        file.write(b"x" * (5_536 + longer))
    log = FeedbackLog(path)
    log.append([event("edit.accepted")])
    assert log.read() == [event("edit.shown"), event("edit.accepted")]


def test_a_long_line_without_an_end_is_kept(tmp_path):
    path = tmp_path / "feedback.jsonl"
    path.write_bytes(b"x" * 200_000)
    log = FeedbackLog(path)
    log.append([event("edit.shown")])
    assert log.read() == [event("edit.shown")]


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"schema": "feedback/9"}'])
def test_a_damaged_line_is_passed_over_and_a_rejection_is_lost(tmp_path, line):
    path = tmp_path / "feedback.jsonl"
    FeedbackLog(path).append([event("edit.shown")])
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(CorruptArtifact, match=r"line 1 of .* is no event of feedback/1"):
        FeedbackLog(path)


W = FeedbackRewards()


@pytest.mark.parametrize(
    ("events", "reward"),
    [
        ([event("edit.shown"), event("edit.accepted", share=1.0)], W.accepted),
        ([event("edit.shown"), event("edit.partial", share=0.5)], 0.5 * W.accepted),
        ([event("edit.shown"), event("edit.accepted"), event("edit.undone")], W.accepted + W.undone),
        ([event("edit.shown"), event("edit.rejected")], W.rejected),
        ([event("edit.shown"), event("edit.rejected"), event("message.followup", correction=True)], -1.0),
        ([event("edit.shown"), event("edit.accepted"), event("edit.persisted")], 1.0),
        ([event("question.asked")], W.no_edit),
        ([event("tool.invalid", count=2)], 2 * W.invalid + W.no_edit),
        ([event("tool.invalid", count=9)], -1.0),
    ],
)
def test_what_users_did_is_worth_something_else(events, reward):
    assert judge(events, W).rewards == {"t": pytest.approx(reward)}


def test_a_broken_call_or_a_question_gets_an_answer_out_of_training():
    judged = judge([event("tool.invalid", "a"), event("question.asked", "b"), event("edit.shown", "c")], W)
    assert judged.rewards["a"] < 0 and judged.rewards["b"] < 0
    assert judged.abstained == ["c"]  # shown, and nobody has said anything


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "edit.shown",
                    "edit.accepted",
                    "edit.rejected",
                    "turn.interrupted",
                    "question.asked",
                    "rating",
                ]
            ),
            st.sampled_from("abcdef"),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_an_answer_is_in_two_groups_or_in_none(drawn):
    events = [event(kind, trajectory, i, consent) for i, (kind, trajectory, consent) in enumerate(drawn)]
    judged = judge(events, W)
    groups = [list(judged.rewards), judged.abstained, judged.excluded, judged.withheld]
    assert sorted(t for group in groups for t in group) == sorted({t for _, t, _ in drawn})
    assert all(-1.0 <= r <= 1.0 for r in judged.rewards.values())
    assert sum(judged.shares().values()) == pytest.approx(1.0) or not drawn


def test_behaviour_and_baselines_are_of_all_answers_together():
    events = [event("edit.shown", "a"), event("edit.accepted", "a"), event("question.asked", "b")]
    assert behaviour(events) == {"edit_rate": 0.5, "question_rate": 0.5, "invalid_rate": 0.0}
    rewards, arms = {"a": 1.0, "b": 0.0, "c": -1.0}, {"a": "serving", "b": "serving", "c": "canary"}
    assert baselines(rewards, arms) == {"serving": 0.5, "canary": -1.0}
