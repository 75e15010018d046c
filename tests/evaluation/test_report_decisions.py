"""A decision's card must say what came of it and why, in words and not by colour alone."""

from __future__ import annotations

import pytest

from cadenza.evaluation.report import write_report
from cadenza.evaluation.report_decisions import card
from cadenza.evaluation.report_inputs import DecisionRecord, RunInfo, append_lines

FEW = "too few answers to decide: 3, and 5 of the policy that is served, where 60 of each are asked for"


def canary(policy: str, state: str, reason: str = FEW) -> DecisionRecord:
    answers = {"serving": 5, "canary": 3}
    return DecisionRecord.from_event(
        "canary", {"policy": policy, "state": state, "reason": reason, "answers": answers, "taken": answers}
    )


def gate(policy: str, promote: bool) -> DecisionRecord:
    checks = [
        {"passed": True, "detail": "same tasks, samples and harness"},
        {"passed": promote, "detail": "pass@1 changed by −9.0 points"},
    ]
    return DecisionRecord.from_event(
        "gate", {"candidate": policy, "baseline": "serving", "promote": promote, "checks": checks}
    )


def test_a_canary_that_met_too_few_users_is_an_empty_card_or_told_in_other_words():
    shown = card(canary("candidate", "watching"))
    assert (shown.chip, shown.tone) == ("too few answers", "open")
    assert "old policy stays" in shown.outcome
    (check,) = shown.checks
    assert check.text == FEW and check.mark not in "✓✗"


def test_a_failed_check_looks_like_one_that_passed(tmp_path):
    append_lines(tmp_path / "gate" / "decisions.jsonl", [gate("rl", False)])
    write_report(tmp_path, run=RunInfo(name="r"))
    html = (tmp_path / "report.html").read_text()
    for tone, mark, word in (("good", "✓", "passed: "), ("bad", "✗", "failed: ")):
        assert (
            f'<li class="tone-{tone}"><span aria-hidden="true">{mark}</span><span><span class="spoken">{word}'
            in html
        )
        assert f".checks .tone-{tone}" in html  # a class without a rule was how they came to look the same
    assert "Stage gate<" in html


@pytest.mark.parametrize(
    ("record", "tone", "outcome"),
    [
        (gate("damaged", False), "good", "As it should be."),
        (gate("damaged", True), "bad", "The guard let it through."),
        (canary("damaged", "rolled_back", "users took 0% of 20 answers"), "good", "As it should be."),
        (canary("damaged", "watching"), "open", "The drill shows nothing"),
        (gate("candidate", True), "good", "Some users may meet it now"),
        (canary("candidate", "rolled_back", "users took 0% of 20 answers"), "bad", "The old policy stays."),
        (canary("candidate", "passed", "users took 50% of 20 answers"), "good", "It serves all users now."),
    ],
)
def test_a_policy_that_was_damaged_on_purpose_is_told_as_a_failure(record, tone, outcome):
    shown = card(record)
    assert shown.tone == tone and shown.outcome.startswith(outcome)
    assert shown.drill == (record.policy == "damaged")
    assert shown.role
