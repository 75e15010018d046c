"""A round with users must be told whole: who answered, what users did, and what became of the candidate."""

from __future__ import annotations

import json

import pytest

from cadenza.evaluation.report import build_report, write_report
from cadenza.evaluation.report_inputs import DecisionRecord, RunInfo, StageInfo, append_lines, read_run
from cadenza.evaluation.report_round import COLUMNS, rounds


def event(occasion: str, arm: str, model: str, rollout: str, kind: str) -> dict:
    policy = {"model": model, "version": 0 if arm == "serving" else 1, "arm": arm}
    return {
        "policy": policy,
        "trajectory_id": f"{occasion}/{arm}-{policy['version']}/{rollout}",
        "kind": kind,
    }


EVENTS = [
    event("round", "serving", "serving", "t/0", "edit.shown"),
    event("round", "serving", "serving", "t/0", "edit.accepted"),
    event("round", "serving", "serving", "u/1", "tool.invalid"),
    event("round", "serving", "serving", "u/1", "tool.invalid"),
    event("0/drill/2", "serving", "serving", "t/2", "edit.shown"),
    event("0/drill/2", "canary", "damaged", "u/3", "question.asked"),
    event("0/deployed/1", "serving", "serving", "u/4", "edit.shown"),
    event("0/deployed/1", "canary", "candidate", "t/5", "edit.shown"),
    event("0/deployed/1", "canary", "candidate", "t/5", "edit.rejected"),
    event("0/deployed/1", "canary", "candidate", "t/5", "message.followup"),
]
DETAIL = {
    "share_rewarded": 0.75, "share_abstained": 0.25, "share_excluded": 0.0, "share_withheld": 0.0,
    "mean_reward": -0.125, "deployed": False,
}  # fmt: skip


def write_round(folder):
    (folder / "realtime").mkdir(parents=True)
    (folder / "realtime" / "feedback.jsonl").write_text("".join(json.dumps(e) + "\n" for e in EVENTS))
    made = [
        DecisionRecord(guard="gate", policy="candidate", against="serving", outcome="promoted"),
        DecisionRecord(guard="canary", policy="candidate", against="serving", outcome="watching"),
        DecisionRecord(guard="gate", policy="damaged", against="serving", outcome="refused"),
    ]
    append_lines(folder / "realtime" / "decisions.jsonl", made)
    return RunInfo(name="r", stages=(StageInfo(name="realtime", status="done", detail=DETAIL),))


def test_a_round_has_no_section(tmp_path):
    (found,) = build_report(read_run(tmp_path, write_round(tmp_path))).rounds
    names = [name for name, _ in COLUMNS]
    rows = {row.title: (row.answers, dict(zip(names, row.counts, strict=True))) for row in found.asked}
    assert list(rows) == [
        "Served policy, learned from", "Candidate, canary", "Served policy, canary", "Damaged policy, drill",
        "Served policy, drill",
    ]  # fmt: skip
    answers, counts = rows["Served policy, learned from"]
    assert (answers, counts["accepted"], counts["invalid call"], counts["rejected"]) == (2, 1, 1, 0)
    assert rows["Candidate, canary"][1]["follow-up"] == rows["Candidate, canary"][1]["rejected"] == 1
    facts = dict(found.facts)
    assert facts["Answers rewarded"] == "75% (without a label 25%, broken off 0%, without consent 0%)"
    assert facts["Mean reward"].startswith("−0.12") and facts["Served now"] == "the old policy"
    assert facts["Canary"] == "too few answers. The old policy stays."
    assert facts["Drills (damaged policy)"] == "gate: refused"
    report = write_report(tmp_path, run=write_round(tmp_path / "again"))
    assert report.rounds[0].asked == found.asked
    html = (tmp_path / "report.html").read_text()
    assert "A round with users" in html and "Served policy, learned from" in html
    assert json.loads((tmp_path / "report.json").read_text())["rounds"][0]["stage"] == "realtime"


def test_an_event_that_is_none_takes_the_page_away(tmp_path):
    run = write_round(tmp_path)
    event = EVENTS[0]
    nameless = {"version": 0, "arm": "serving"}
    damaged = [
        {"kind": "edit.shown"}, [], event | {"policy": nameless}, event | {"policy": nameless | {"model": 7}},
        event | {"trajectory_id": ["/serving-0/"]}, event | {"trajectory_id": "elsewhere"}, event | {"kind": []},
        event | {"policy": "/serving-0/"},
    ]  # fmt: skip
    with (tmp_path / "realtime" / "feedback.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in damaged) + '{"pol')
    report = build_report(read_run(tmp_path, run))
    assert len(report.rounds[0].asked) == 5
    assert any(f"{len(damaged)} entries do not fit" in text for text in report.problems)
    assert any("1 line could not be read" in text for text in report.problems)


@pytest.mark.parametrize(
    ("occasion", "title"),
    [
        ("round", "Served policy, learned from"),
        ("0/deployed/1", "Served policy, canary"),
        ("0/drill/2", "Served policy, drill"),
    ],
)
def test_a_canary_whose_first_answers_are_of_the_served_policy_is_told_as_learned_from(occasion, title):
    told = [event(occasion, "serving", "serving", "t/0", "edit.shown")]
    assert [row.title for row in rounds({"realtime": told}, [], [])[0].asked] == [title]
