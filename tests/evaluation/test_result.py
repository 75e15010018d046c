"""A stored result must come back the same, or say that it is broken."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_made import task

from cadenza.core.errors import CorruptArtifact, MissingArtifact
from cadenza.core.types import Rollout, Verdict
from cadenza.evaluation.result import EvalRecord, EvalResult, TaskFacts, facts_of, record_of, write_text
from cadenza.evaluation.suite import SuiteConfig, pin
from cadenza.tasks.bugs import UNSEEN_FAMILIES

names = st.text(min_size=1, max_size=8)
facts = st.builds(
    TaskFacts, split=st.just("heldout"), family=st.sampled_from(["a", "b", "ü"]),
    ambiguity=st.integers(0, 2), edits=st.integers(1, 2), unseen=st.booleans(),
)  # fmt: skip


@st.composite
def results(draw):
    tasks = draw(st.dictionaries(names, facts, max_size=5))
    samples = draw(st.integers(1, 4))
    records = []
    for t in tasks:
        for s in range(samples):
            solved = draw(st.sampled_from([True, False, None, "absent"]))
            if solved == "absent":
                continue
            failure = draw(st.sampled_from(["sandbox_gone", "engine_lost"])) if solved is None else None
            records.append(
                EvalRecord(
                    task_id=t,
                    sample=s,
                    solved=solved,
                    failure=failure,
                    tokens=draw(st.integers(0, 9)),
                    turns=1,
                    contexts=draw(st.sampled_from([None, 1, 3])),
                    ended=draw(st.sampled_from([None, "finish", "max_turns"])),
                )
            )
    return EvalResult(
        policy="rl", suite="heldout", suite_digest="s", temperature=0.7, seed=1, samples=samples, tasks=tasks,
        records=tuple(records),
    )  # fmt: skip


@given(result=results())
def test_a_result_survives_the_file(tmp_path_factory, result):
    path = tmp_path_factory.mktemp("r") / "deep" / "result.json"
    result.save(path)
    again = EvalResult.load(path)
    assert again == result
    assert again.outcomes().task_ids == result.outcomes().task_ids
    np.testing.assert_array_equal(again.outcomes().solved_NS, result.outcomes().solved_NS)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_file_is_refused_for_fields_that_came_later(tmp_path, missing):
    one().save(tmp_path / "r.json")
    body = json.loads((tmp_path / "r.json").read_text())
    del body["record_fields"][-missing:]
    body["records"] = [row[:-missing] for row in body["records"]]
    (tmp_path / "r.json").write_text(json.dumps(body))
    assert EvalResult.load(tmp_path / "r.json") == one()
    del body["record_fields"][-1:]
    (tmp_path / "r.json").write_text(json.dumps(body))
    with pytest.raises(CorruptArtifact):
        EvalResult.load(tmp_path / "r.json")


def test_endings_are_counted_without_records_that_name_none():
    records = [
        EvalRecord(task_id="t", sample=i, solved=True, tokens=1, turns=1, ended=ended)
        for i, ended in enumerate([None, "max_turns", "finish", "finish"])
    ]
    assert one(records=records, samples=4).endings() == {"finish": 2, "max_turns": 1}


@given(result=results())
def test_slices_partition_the_tasks(result):
    for by in ("family", "ambiguity", "edits", "unseen", "split"):
        parts = [t for part in result.slices(by).values() for t in part.task_ids]
        assert sorted(parts) == sorted(result.tasks)


def one(**changes) -> EvalResult:
    base = {
        "policy": "rl", "suite": "heldout", "suite_digest": "s", "temperature": 0.7, "seed": 1, "samples": 2,
        "tasks": {"t": TaskFacts(split="heldout", family="a", ambiguity=0, edits=1)},
        "records": [EvalRecord(task_id="t", sample=1, solved=True, tokens=3, turns=1)],
    }  # fmt: skip
    return EvalResult(**{**base, **changes})


def test_a_summary_tells_the_rate_and_what_has_no_verdict():
    assert (
        one().summary()
        == "rl on heldout: 1 tasks x 2, t = 0.7: pass@1 100.0% [2.5, 100.0], 50.0% without a verdict"
    )
    assert one(records=[]).summary().endswith("no rollout has a verdict")


def test_a_slot_that_was_never_run_is_missing_and_not_unsolved():
    solved = one().outcomes().solved_NS
    assert math.isnan(solved[0, 0]) and solved[0, 1] == 1.0


def test_a_record_twice_or_of_an_unknown_task_or_without_a_reason_is_refused():
    record = EvalRecord(task_id="t", sample=1, solved=True, tokens=3, turns=1)
    with pytest.raises(ValueError):
        one(records=[record, record])
    with pytest.raises(ValueError):
        one(records=[record.model_copy(update={"task_id": "other"})])
    with pytest.raises(ValueError):
        EvalRecord(task_id="t", sample=0, solved=None, tokens=0, turns=0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: json.dumps({**json.loads(text), "format_version": 99}),
        lambda text: json.dumps({**json.loads(text), "surprise": 1}),
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "records"}),
        lambda text: json.dumps({**json.loads(text), "records": [[7, 0, True, None, 1, 1, 1]]}),
        lambda text: "[]",
        lambda text: "",
    ],
)
def test_a_damaged_file_is_named_and_never_half_read(tmp_path: Path, damage):
    path = tmp_path / "result.json"
    one().save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(CorruptArtifact, match=r"result\.json"):
        EvalResult.load(path)


def test_a_missing_file_says_what_to_run(tmp_path: Path):
    with pytest.raises(MissingArtifact, match="cadenza eval"):
        EvalResult.load(tmp_path / "none.json")


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path):
    path = tmp_path / "result.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_facts_name_every_planted_family():
    got = facts_of(task("t", families=["swap", "off_by_one"], edits=2))
    assert (got.family, got.edits, got.unseen) == ("off_by_one+swap", 2, False)


def test_a_task_with_one_unseen_family_is_reported_apart():
    assert facts_of(task("t", families=["off_by_one", UNSEEN_FAMILIES[0]], edits=2)).unseen


def test_a_suite_refuses_other_tasks_and_another_harness():
    tasks = [task("a"), task("b")]
    suite = pin(SuiteConfig(), tasks, "h1")
    suite.check(list(reversed(tasks)), "h1")
    with pytest.raises(CorruptArtifact, match="pinned"):
        suite.check(tasks[:1], "h1")
    with pytest.raises(CorruptArtifact, match="harness"):
        suite.check(tasks, "h2")
    with pytest.raises(ValueError):
        pin(SuiteConfig(), [task("a"), task("a")], "h1")


def test_a_run_that_ended_between_two_contexts_is_said_to_have_ended_by_its_summary():
    about = task("a")
    trace = [{"call": "run_tests"}, {"summary": {"finish_reason": "budget", "turns": 1}}]
    made = Rollout("r", "g", about.id, [], trace, "", Verdict(0.0), {}, 0.0, "finished", {}, 0)
    assert record_of(about, 0, made).ended == "budget"
    assert record_of(about, 0, dataclasses.replace(made, trace=[])).ended is None
