"""Two results may be subtracted only when they measured the same tasks in the same harness."""

from __future__ import annotations

import pytest
from runs_made import evaluation, write_run

from cadenza.core.errors import ConfigError
from cadenza.evaluation.comparison import VIEWS, Results, compare
from cadenza.evaluation.report import write_report

HELDOUT = next(view for view in VIEWS if view.key == "heldout")


def result(policy, seed=0, tasks=20, samples=4, **changes):
    return evaluation(policy, "heldout", seed, 0.7, tasks, samples).model_copy(update=changes)


@pytest.mark.parametrize(
    ("strange", "told"),
    [
        ({"harness_digest": "other"}, "in different harnesses"),
        ({"suite_digest": "other"}, r"on different tasks \(seed 0"),
        ({"tasks": 19}, r"on different tasks \(seed 0"),
    ],
)
def test_results_of_other_tasks_or_another_harness_are_never_subtracted(strange, told):
    results = [result("sft"), result("rl", **strange)]
    with pytest.raises(ConfigError, match=told) as failure:
        Results(results).change(HELDOUT, "rl", "sft")
    assert "\n" not in str(failure.value)
    with pytest.raises(ConfigError, match="'rl' and 'sft' do not compare"):
        compare(results)


def test_seeds_measured_in_different_harnesses_are_not_pooled():
    def both(seed, harness):
        return [result(policy, seed, harness_digest=harness) for policy in ("sft", "rl")]

    with pytest.raises(ConfigError, match="in different harnesses"):
        Results([*both(0, "h"), *both(1, "i")]).change(HELDOUT, "rl", "sft")


def test_seeds_may_have_tasks_of_their_own():
    def both(seed, tasks):
        return [result(policy, seed, tasks=tasks, suite_digest=str(seed)) for policy in ("sft", "rl")]

    change = Results([*both(0, 20), *both(1, 30)]).change(HELDOUT, "rl", "sft")
    assert change is not None and len(change.per_seed) == 2


def test_a_policy_measured_with_fewer_samples_is_still_paired_by_task():
    (view, *_) = compare([result("base", samples=1), result("sft"), result("rl")])
    changes = {(c.old, c.new): c for c in view.changes}
    assert changes["base", "sft"].sampled and changes["base", "sft"].best is None
    assert changes["sft", "rl"].best and changes["sft", "rl"].best_k == 4
    assert view.best_k == 4 and [bool(view.best_of(row)) for row in view.rows] == [False, True, True]
    assert [row.samples for row in view.rows] == [1, 4, 4]


def test_a_report_over_results_that_do_not_compare_shows_rates_and_says_why(tmp_path):
    folder = write_run(tmp_path / "r", policies=("sft", "rl"), tasks=20)
    for path in (folder / "evaluations").glob("rl-*.json"):
        path.write_text(path.read_text().replace('"harness_digest":"h"', '"harness_digest":"other"'))
    report = write_report(folder)
    assert any("do not compare" in problem for problem in report.problems)
    assert [row.policy for row in report.comparisons[0].rows] == ["sft", "rl"]
    assert report.comparisons[0].changes == ()
