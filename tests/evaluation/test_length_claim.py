"""The figures of the price on length, from made evaluations whose answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from experiments_made import experiment
from runs_made import evaluation

from cadenza.evaluation.statistics import Outcomes

SAVED = {"easy": 0.4, "hard": 0.1}


@pytest.fixture(scope="module")
def driver():
    with experiment("length_price") as module:
        yield module


def records_of(driver, tmp_path, seeds=(0, 1), skill=0.9) -> dict[tuple[str, int], dict[str, Any]]:
    """Evaluations on disk and records that name them. ``rl_short`` needs fewer tokens, most on the easy third."""
    folder = tmp_path / "length_price" / "evaluations"
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in seeds:
        sft = evaluation("sft", "heldout", seed, 0.6, 90, 6, skill=-0.5)
        long = evaluation("rl", "heldout", seed, 0.6, 90, 4, skill=0.9)
        short = evaluation("rl_short", "heldout", seed, 0.6, 90, 4, skill=skill)
        easy = driver._easiest(sft.outcomes())
        of_long = {(r.task_id, r.sample): r.tokens for r in long.records}
        saved = [
            r.model_copy(
                update={
                    "tokens": round(
                        of_long[r.task_id, r.sample] * (1 - SAVED["easy" if r.task_id in easy else "hard"])
                    )
                }
            )
            for r in short.records
        ]
        short = short.model_copy(update={"records": tuple(saved)})
        names = {"before": [("sft", sft)], "eval": [("rl", long), ("rl_short", short)]}
        for arm, made in names.items():
            for policy, result in made:
                result.save(folder / f"{policy}-heldout-seed{seed}.json")
            kept = [f"{policy}-heldout-seed{seed}.json" for policy, _ in made]
            records[arm, seed] = {"evaluations": kept, "stages": {}}
    return records


def test_a_price_on_length_is_compared_on_other_tasks_or_with_another_policy(driver, tmp_path):
    claim = driver.LengthPrice(tmp_path, tmp_path / "runs")
    figures = {f.figure: f for f in claim.figures(records_of(driver, tmp_path))}
    assert set(figures) == {
        "length_drop_easy", "length_drop_hard", "length_drop_easy_over_hard", "length_pass1_change_points",
    }  # fmt: skip
    easy, hard, over = (figures[f"length_drop_{name}"] for name in ("easy", "hard", "easy_over_hard"))
    assert easy.value == pytest.approx(40, abs=1) and hard.value == pytest.approx(10, abs=1)
    assert over.value == pytest.approx(30, abs=1) and over.interval and over.interval[0] > 20
    assert easy.seeds == (0, 1) and 30 <= (easy.n or 0) < 60 <= (hard.n or 0) < 90
    assert "met" in (figures["length_pass1_change_points"].note or "")


def test_easy_tasks_are_others_than_those_that_sft_solves_most_often(driver):
    rates = {"f": 1, "e": 1, "d": 1, "c": 0, "b": 0, "a": 0}
    solved = np.array([[float(rate)] for rate in rates.values()])
    outcomes = Outcomes(tuple(rates), solved, np.ones_like(solved))
    assert driver._easiest(outcomes) == {"d", "e"}, "a third, ties by name"


def test_a_price_that_costs_solved_tasks_is_said_to_miss_its_bar(driver, tmp_path):
    claim = driver.LengthPrice(tmp_path, tmp_path / "runs")
    figures = {f.figure: f for f in claim.figures(records_of(driver, tmp_path, skill=-0.6))}
    change = figures["length_pass1_change_points"]
    assert change.value < -10 and "missed" in (change.note or "")


def test_a_seed_without_its_evaluation_spoils_the_figures_of_the_others(driver, tmp_path):
    claim = driver.LengthPrice(tmp_path, tmp_path / "runs")
    records = records_of(driver, tmp_path)
    del records["eval", 1]
    assert {f.seeds for f in claim.figures(records)} == {(0,)}
    assert claim.figures({key: r for key, r in records.items() if key[0] == "before"}) == []


def test_every_stage_of_the_recipe_belongs_to_an_arm(driver, tmp_path):
    claim = driver.LengthPrice(tmp_path, tmp_path / "runs")
    plan = claim.plan(0)
    covered = {name for arm in claim.arms for name in claim.stages_of(arm, plan)}
    assert covered == {stage.name for stage in plan.stages}


def test_both_policies_are_trained_alike_but_for_the_price(driver, tmp_path):
    plan = driver.LengthPrice(tmp_path, tmp_path / "runs").plan(0)
    settings = [dict(plan.stage_named(name).settings) for name in ("rl", "rl_short")]
    prices = [s["services"]["environment"]["rewards"].pop("length") for s in settings]
    assert prices[0]["scale"] == 0 < prices[1]["scale"]
    assert settings[0] == settings[1]
    assert plan.stage_named("rl").inputs == plan.stage_named("rl_short").inputs
