"""The figures of the whole loop's proof, from made evaluations whose answer is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from experiments_made import experiment
from runs_made import evaluation

from cadenza.core.errors import ConfigError

SKILL = {"sft_summary": -0.5, "rl_summary": 1.0, "rl_sliding": -0.2, "rl_short": 0.9}


@pytest.fixture(scope="module")
def driver():
    with experiment("whole_loop") as module:
        yield module


def records_of(driver, tmp_path, seeds=(0, 1)) -> dict[tuple[str, int], dict[str, Any]]:
    """Evaluations of two seeds on disk, and records that name them. ``rl_short`` needs fewer tokens on every task."""
    folder = tmp_path / "whole_loop" / "evaluations"
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in seeds:
        arms = {"sft_summary": "before", "rl_short": "eval_short"}
        names: dict[str, list[str]] = {"before": [], "eval_windows": [], "eval_short": []}
        for policy, skill in SKILL.items():
            for suite, tasks in (("heldout_hard", 60), ("heldout", 90)):
                made = evaluation(policy, suite, seed, 0.6, tasks, 4, skill=skill)
                if policy == "rl_short":
                    easy = [r.model_copy(update={"tokens": round(r.tokens * 0.7)}) for r in made.records]
                    made = made.model_copy(update={"records": tuple(easy)})
                name = f"{policy}-{suite}-seed{seed}.json"
                names[arms.get(policy, "eval_windows")].append(name)
                made.save(folder / name)
        for arm, kept in names.items():
            records[arm, seed] = {"evaluations": kept, "stages": {}}
        figures = {"perplexity_after_quarter4": 20.0, "perplexity_unstretched_quarter4": 25.0}
        figures |= {"perplexity_after_quarter1": 19.0, "perplexity_unstretched_quarter1": 20.0}
        records["prepare", seed] = {"stages": {"long": {"figures": figures}}}
        taken = {"damaged_refused": True, "damaged_rolled_back": seed == 0}
        records["realtime", seed] = {"stages": {"realtime": {"figures": taken}}}
        records["rl_summary", seed] = {
            "stages": {"rl_summary": {"delta_vs_full": 0.6, "spans_versions": 0.3, "swap_pause_steps": 0.2}}
        }
    return records


def test_a_figure_of_the_whole_loop_is_missing_or_of_another_pair(driver, tmp_path):
    claim = driver.WholeLoop(tmp_path, tmp_path / "runs")
    figures = {f.figure: f for f in claim.figures(records_of(driver, tmp_path))}
    assert set(figures) == {
        "summary_vs_window_points", "summary_rl_vs_sft_points", "length_drop_easy", "length_drop_hard",
        "length_drop_easy_over_hard", "length_pass1_change_points", "delta_vs_full", "swap_pause_steps",
        "rollouts_spanning_versions", "longctx_perplexity_ratio", "bad_checkpoint_refused",
    }  # fmt: skip
    gain = figures["summary_vs_window_points"]
    assert gain.seeds == (0, 1) and gain.n == 60 and gain.interval and gain.interval[0] > 0
    assert figures["summary_rl_vs_sft_points"].value > gain.value
    assert "bar" in (figures["length_pass1_change_points"].note or "")
    for name in ("length_drop_easy", "length_drop_hard"):
        assert figures[name].value == pytest.approx(30, abs=3), "the share of tokens saved, in hundredths"
    assert figures["length_drop_easy_over_hard"].value == pytest.approx(0, abs=3)
    assert "took several" in (gain.note or "")
    easy, hard = (figures[f"length_drop_{name}"].n or 0 for name in ("easy", "hard"))
    assert 30 <= easy < 60 <= hard < 90, "a third of the tasks for each seed, by that seed's SFT"
    assert figures["longctx_perplexity_ratio"].value == 0.8 and figures["bad_checkpoint_refused"].value == 0.5
    assert figures["delta_vs_full"].value == 0.6 and figures["rollouts_spanning_versions"].value == 0.3


def test_the_model_is_measured_without_the_artifacts_it_was_recorded_with_or_mixed_up_between_seeds(
    driver, tmp_path, monkeypatch
):
    claim = driver.WholeLoop(tmp_path / "results", tmp_path / "runs")
    arms = {arm.name: arm for arm in claim.arms}
    monkeypatch.setattr(
        claim, "record", lambda arm, _: {"design": claim.design} if arm == "prepare" else None
    )
    with pytest.raises(ConfigError, match="needs rl_summary first"):
        claim.run(arms["speculative"], 0)
    with pytest.raises(ConfigError, match="is recorded, but .* is not there"):
        claim.execute(arms["replay"], 0)
    row = {"turns": 2, "tokens": 9, "speedup": 1.5, "turns_that_differ": 0, "widest_tie": 0.0}
    rows = [
        {**row, "dtype": dtype, "temperature": t, "accepted_by_position": [0.8, 0.6]}
        for dtype in ("float32", "bfloat16")
        for t in (0.0, 0.6, 1.0)
    ]
    faster = [{**row, "speedup": 1.7} for row in rows]
    modes = {"none": 0.2, "pure": 0.1, "filtered": 0.1, "other": 0.1, "tokens": 50.0}
    records = {
        ("speculative", 0): {"stages": {"speculative": {"figures": {"found": rows}}}},
        ("speculative", 1): {"stages": {"speculative": {"figures": {"found": faster}}}},
        ("replay", 1): {"stages": {"replay": {"figures": {"found": {"noise 0.15": modes}}}}},
    }
    figures = {f.figure: f for f in claim.figures(records)}
    assert figures["mtp_speedup"].value == pytest.approx(1.6) and figures["mtp_speedup"].seeds == (0, 1)
    assert figures["mtp_acceptance"].value == pytest.approx(0.8)
    assert figures["mtp_mismatch_fp32"].n == 12 and figures["replay_p99_none"].seeds == (1,)


def test_figures_wait_for_what_is_not_there_yet(driver, tmp_path):
    claim = driver.WholeLoop(tmp_path, tmp_path / "runs")
    records = {k: r for k, r in records_of(driver, tmp_path).items() if k[0] in ("prepare", "rl_summary")}
    found = {f.figure for f in claim.figures(records)}
    assert found == {
        "delta_vs_full",
        "swap_pause_steps",
        "rollouts_spanning_versions",
        "longctx_perplexity_ratio",
    }
    assert claim.figures({}) == []
    records = records_of(driver, tmp_path)
    del records["eval_short", 1]
    lengths = [f for f in claim.figures(records) if f.figure.startswith("length")]
    assert len(lengths) == 4 and {f.seeds for f in lengths} == {(0,)}, (
        "a seed that lacks a policy is left out"
    )


def test_every_stage_of_the_claims_recipe_belongs_to_an_arm(driver, tmp_path):
    claim = driver.WholeLoop(tmp_path, tmp_path / "runs")
    plan = claim.plan(0)
    covered = {name for arm in claim.arms for name in claim.stages_of(arm, plan)}
    assert covered == {stage.name for stage in plan.stages}
    assert {arm.name for arm in claim.arms} >= {name for arm in claim.arms for name in arm.after}
    assert dataclasses.is_dataclass(claim.arms[0])
