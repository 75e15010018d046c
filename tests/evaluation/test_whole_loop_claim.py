"""The figures of the whole loop's proof, from made evaluations whose answer is known."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from experiments_made import experiment
from rollouts_made import rollout, task
from runs_made import evaluation

from cadenza.core.errors import ConfigError, MissingArtifact
from cadenza.core.files import write_json
from cadenza.rollouts.record import write_rollouts

SKILL = {"sft_summary": -0.5, "rl_summary": 1.0, "rl_sliding": -0.2}


@pytest.fixture(scope="module")
def driver():
    with experiment("whole_loop") as module:
        yield module


def records_of(driver, tmp_path, seeds=(0, 1)) -> dict[tuple[str, int], dict[str, Any]]:
    """Evaluations of two seeds on disk, and records that name them."""
    folder = tmp_path / "whole_loop" / "evaluations"
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in seeds:
        arms = {"sft_summary": "before"}
        names: dict[str, list[str]] = {"before": [], "eval_windows": []}
        for policy, skill in SKILL.items():
            for suite, tasks in (("heldout_hard", 60), ("heldout", 90)):
                made = evaluation(policy, suite, seed, 0.6, tasks, 4, skill=skill)
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
        "summary_vs_window_points", "summary_rl_vs_sft_points", "delta_vs_full", "swap_pause_steps",
        "rollouts_spanning_versions", "longctx_perplexity_ratio", "bad_checkpoint_refused",
    }  # fmt: skip
    gain = figures["summary_vs_window_points"]
    assert gain.seeds == (0, 1) and gain.n == 60 and gain.interval and gain.interval[0] > 0
    assert figures["summary_rl_vs_sft_points"].value > gain.value
    assert "took several" in (gain.note or "")
    assert figures["longctx_perplexity_ratio"].value == 0.8 and figures["bad_checkpoint_refused"].value == 0.5
    assert figures["delta_vs_full"].value == 0.6 and figures["rollouts_spanning_versions"].value == 0.3


def test_the_model_is_measured_without_the_artifacts_it_was_recorded_with_or_mixed_up_between_seeds(
    driver, tmp_path, monkeypatch
):
    claim = driver.WholeLoop(tmp_path / "results", tmp_path / "runs")
    arms = {arm.name: arm for arm in claim.arms}
    monkeypatch.setattr(
        claim,
        "record",
        lambda arm, _: {"design": claim.design, "conditions": {}} if arm == "prepare" else None,
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


def recorded(claim, arm: str, seed: int, **changes: Any) -> None:
    """The record of an arm that needs no run."""
    body = {"format_version": 1, "arm": arm, "seed": seed, "design": claim.design}
    body |= {"conditions": json.loads(json.dumps(claim.conditions.get(arm, {})))}
    body |= {"stages": {}, "evaluations": [], "curves": []} | changes
    claim.record_path(arm, seed).parent.mkdir(parents=True, exist_ok=True)
    write_json(claim.record_path(arm, seed), body)


def test_models_measured_under_unlike_conditions_are_pooled_or_measured_for_nothing(driver, tmp_path, capsys):
    options = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    claim = driver.WholeLoop(tmp_path / "results", tmp_path / "runs")
    shorter = claim.conditions["replay"] | {"turns": 10}
    rows = {"noise 0.15": {"none": 0.2, "pure": 0.1, "filtered": 0.1, "other": 0.1, "tokens": 50.0}}
    measured = {"stages": {"replay": {"seconds": 1.0, "figures": {"found": rows}}}}
    for seed in (0, 1):
        recorded(claim, "rl_summary", seed, stages={"rl_summary": {"seconds": 1.0}})
        recorded(claim, "replay", seed, **measured, **({"conditions": shorter} if seed == 0 else {}))
    for command in (["--pool"], ["--seed", "2", "--only-arm", "replay"]):
        assert driver.main([*options, *command]) == ConfigError.exit_code
        (told,) = capsys.readouterr().err.splitlines()
        assert "makes them: seed 0: replay;" in told and "--restart --seed 0 --only-arm replay," in told
    assert driver.main([*options, "--seed", "0", "--only-arm", "replay"]) == ConfigError.exit_code
    assert "replay-seed0.json was made with other conditions" in capsys.readouterr().err
    recorded(claim, "replay", 1, conditions=shorter, **measured)
    assert {f.figure for f in claim.pool()} >= {"replay_p99_none"}, "all of one kind are pooled, old or not"


def test_the_speculative_arm_fails_where_another_arm_has_run_since(driver, tmp_path, capsys):
    claim = driver.WholeLoop(tmp_path / "results", tmp_path / "runs")
    plan = claim.plan(0)
    run = claim.run_folder(plan, 0)
    for stage in plan.stages:
        (run / stage.name).mkdir(parents=True)
    part = dataclasses.replace(plan, stages=plan.stages[:3])
    (run / "recipe.toml").write_text(part.toml())
    speculative = driver.speculative
    arm = next(arm for arm in claim.arms if arm.name == "speculative")
    with pytest.raises(MissingArtifact, match=r"no rollouts at .*/demos_summary/demonstrations\.cdzr"):
        claim.execute(arm, 0)
    made = [rollout(task(f"task-{n}"), n, 1.0) for n in range(20)]
    write_rollouts(run / "demos_summary" / "demonstrations.cdzr", made)
    turns = speculative.turns_of(run, plan.stage_named("sft_summary"), 5)
    assert [turn.ids for turn in turns] == [tuple(range(5))] * 2, "a tenth of the tasks is held out"
    assert speculative.main([str(run), "--sft", "sft_summary"]) == ConfigError.exit_code
    assert speculative.main([str(run), "--sft", "base"]) == ConfigError.exit_code
    assert speculative.main([str(tmp_path / "none")]) == ConfigError.exit_code
    lacks, no_sft, nothing = capsys.readouterr().err.splitlines()
    assert "recipe.toml has no stage 'sft_summary'" in lacks and "--sft, of tasks, base, cpt" in lacks
    assert "'base' trains on no demonstrations" in no_sft and "no recipe file" in nothing


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
    del records["eval_windows", 1]
    gains = [f for f in claim.figures(records) if f.figure.startswith("summary")]
    assert len(gains) == 2 and {f.seeds for f in gains} == {(0,)}, "a seed that lacks a policy is left out"


def test_every_stage_of_the_claims_recipe_belongs_to_an_arm(driver, tmp_path):
    claim = driver.WholeLoop(tmp_path, tmp_path / "runs")
    plan = claim.plan(0)
    covered = {name for arm in claim.arms for name in claim.stages_of(arm, plan)}
    assert covered == {stage.name for stage in plan.stages}
    assert {arm.name for arm in claim.arms} >= {name for arm in claim.arms for name in arm.after}
    assert dataclasses.is_dataclass(claim.arms[0])
