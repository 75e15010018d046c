"""A gate that lets a worse policy through, keeps an equal one out, or leaves a question open without a word."""

from __future__ import annotations

import random
import re
from xml.etree import ElementTree

import pytest
from runs_made import evaluation

from cadenza.evaluation.gate import GateConfig, decide
from cadenza.evaluation.result import EvalRecord


def results(policy: str, skill: float, tasks: int = 100, samples: int = 8, seed: int = 0):
    return [
        evaluation(policy, "heldout", seed, temperature, tasks, n, skill=skill)
        for temperature, n in ((0.7, samples), (0.0, 1))
    ]


def failed(decision) -> list[str]:
    return [check.name for check in decision.checks if not check.passed]


def test_a_policy_is_kept_out_by_itself():
    same = results("sft", 0.0)
    decision = decide(same, same)
    assert decision.promote and decision.reasons() == []
    names = [check.name for check in decision.checks]
    assert {"candidate_valid", "baseline_valid", "comparable", "pass@1", "greedy", "tokens"} <= set(names)
    assert {"ambiguity=0", "ambiguity=1", "ambiguity=2", "unseen=True", "unseen=False"} <= set(names)


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_checkpoint_is_deployed(seed):
    decision = decide(results("damaged", -1.2, seed=seed), results("sft", 0.0, seed=seed))
    assert not decision.promote and "pass@1" in failed(decision)
    assert any("the lower end has to lie above −5.0" in reason for reason in decision.reasons())


def test_a_better_policy_is_refused_or_an_equal_one_although_there_are_tasks_enough():
    for seed in range(4):
        for skill in (0.4, 0.9):
            assert decide(results("rl", skill, seed=seed), results("sft", 0.0, seed=seed)).promote
        equal = decide(results("rl", 0.0, tasks=400, seed=seed), results("sft", 0.0, tasks=400, seed=seed))
        assert equal.promote, equal.reasons()


@pytest.mark.parametrize(
    ("tasks", "margin", "told"),
    [
        (16, 0.05, "; 16 tasks cannot show less than 20.6 points, .* margin 5 needs 72 tasks or more$"),
        (71, 0.05, "; 71 tasks cannot show less than 5.1 points, .* margin 5 needs 72 tasks or more$"),
        (72, 0.05, ""),
        (8, 0.0, "; 8 tasks cannot show less than 36.9 points, .* margin 0 is shown by no number$"),
    ],
)
def test_the_same_outcomes_are_refused_and_nobody_learns_that_the_tasks_are_too_few(tasks, margin, told):
    same = results("sft", 0.0, tasks=tasks)
    decision = decide(same, same, GateConfig(margin=margin))
    (check,) = [check for check in decision.checks if check.name == "pass@1"]
    assert check.passed == decision.promote == (not told)
    assert re.search(told, check.detail) if told else "cannot show" not in check.detail
    assert decision.reasons() == ([check.detail] if told else [])


def test_the_first_policy_is_refused_for_want_of_another():
    decision = decide(results("sft", 0.0), [])
    assert decision.promote and decision.baseline == ""
    with pytest.raises(ValueError, match="a result of the candidate"):
        decide([], results("sft", 0.0))


def test_results_that_do_not_compare_are_compared():
    old = results("sft", 0.0)
    for change in ({"suite_digest": "other"}, {"harness_digest": "other"}):
        new = [r.model_copy(update=change) for r in results("rl", 2.0)]
        assert failed(decide(new, old)) == ["comparable"]
    for new in (results("rl", 2.0)[:1], results("rl", 2.0, samples=4), results("rl", 2.0, seed=1)):
        decision = decide(new, old)
        assert failed(decision) == ["comparable"] and not decision.promote


@pytest.mark.parametrize("side", ["candidate", "baseline"])
def test_missing_verdicts_hide_a_loss(side):
    good, holed = results("a", 0.0), results("b", 0.0)
    chance = random.Random(0)
    holed[0] = holed[0].model_copy(
        update={
            "records": tuple(
                r.model_copy(update={"solved": None, "failure": "sandbox_gone"})
                if chance.random() < 0.05
                else r
                for r in holed[0].records
            )
        }
    )
    decision = decide(holed, good) if side == "candidate" else decide(good, holed)
    assert failed(decision) == [f"{side}_valid"]


def test_a_loss_on_one_kind_of_task_hides_in_the_mean():
    old, new = results("sft", 0.0, tasks=200), results("rl", 1.5, tasks=200)

    def spoiled(record: EvalRecord, facts) -> EvalRecord:
        return record.model_copy(update={"solved": False}) if facts[record.task_id].unseen else record

    new = [r.model_copy(update={"records": tuple(spoiled(x, r.tasks) for x in r.records)}) for r in new]
    decision = decide(new, old)
    assert failed(decision) == ["unseen=True"]
    assert decide(new, old, GateConfig(slices=("ambiguity",))).promote


def test_a_policy_that_thinks_for_ever_is_promoted():
    old, new = results("sft", 0.0), results("rl", 0.5)
    longer = [
        r.model_copy(
            update={"records": tuple(x.model_copy(update={"tokens": 3 * x.tokens}) for x in r.records)}
        )
        for r in new
    ]
    assert failed(decide(longer, old)) == ["tokens"]


def test_a_task_that_must_pass_is_not_asked_for():
    new = results("rl", 0.5)
    solved = {r.task_id for x in new for r in x.records if r.solved}
    known = sorted(solved)[0]
    assert decide(new, [], GateConfig(must_pass=(known,))).promote
    decision = decide(new, new, GateConfig(must_pass=(known, "no-such-task")))
    assert failed(decision) == ["must_pass"] and "no-such-task" in decision.reasons()[0]


def test_a_decision_in_junit_counts_other_failures():
    decision = decide(results("damaged", -1.5), results("sft", 0.0))
    suite = ElementTree.fromstring(decision.junit())
    assert suite.get("tests") == str(len(decision.checks))
    assert [c.get("name") for c in suite if c.find("failure") is not None] == failed(decision)
    assert suite.get("failures") == str(len(failed(decision)))
