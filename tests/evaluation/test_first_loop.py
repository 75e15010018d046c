"""The proof takes hours: no finished arm may be lost, run twice, skipped silently or pooled with a stranger."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from experiments_made import experiment

from cadenza.core.errors import ConfigError, CorruptArtifact
from cadenza.evaluation.figures import read_figures
from cadenza.evaluation.report_inputs import Metrics, MetricWriter, read_metrics

RECIPE = """
name = "proof"
stage = [
  { name = "tasks", kind = "stages_made:Plain" },
  { name = "sft", kind = "stages_made:Plain", inputs = { tasks = "tasks" } },
  { name = "rl", kind = "stages_made:Plain", pace = 12.0, inputs = { policy = "sft" } },
  { name = "sft_continued", kind = "stages_made:Plain", inputs = { policy = "sft" } },
  { name = "rl_sync_1x1", kind = "stages_made:Plain", pace = 4.0, inputs = { policy = "sft" } },
  { name = "rl_sync_2x2", kind = "stages_made:Plain", pace = 8.0, inputs = { policy = "sft" } },
  { name = "eval", kind = "stages_made:Eval", inputs = { sft = "sft", rl = "rl", continued = "sft_continued" } },
]
"""


@pytest.fixture(scope="module")
def driver():
    with experiment("first_loop") as module:
        yield module


@pytest.fixture
def place(tmp_path):
    (tmp_path / "proof.toml").write_text(RECIPE)
    options = ["--recipe", str(tmp_path / "proof.toml"), "--runs", str(tmp_path / "runs")]
    return tmp_path / "results", [*options, "--results", str(tmp_path / "results")]


def test_all_arms_of_two_seeds_give_every_figure_and_nothing_runs_twice(driver, place, capsys):
    results, options = place
    assert driver.main([*options, "--seed", "0", "--seed", "1"]) == 0
    figures = {f.figure: f for f in read_figures(results / "first_loop.jsonl")}
    assert set(figures) == {
        "rl_gain_points", "rl_vs_sft_continued_points", "greedy_change_points", "best8_change_points",
        "unseen_family_gain_points", "hard_split_gain_points", "trainer_busy", "engine_busy", "env_busy",
        "async_vs_sync",
    }  # fmt: skip
    gain = figures["rl_gain_points"]
    assert gain.seeds == (0, 1) and gain.n == 200 and gain.interval and gain.interval[0] > 0
    assert "bar: at least 8 and interval above 0: met" in (gain.note or "")
    assert figures["unseen_family_gain_points"].n == 50
    assert figures["hard_split_gain_points"].n == 40 and "bar" not in (
        figures["hard_split_gain_points"].note or ""
    )
    assert figures["async_vs_sync"].value == 1.5 and figures["async_vs_sync"].peer_value == 8.0
    assert figures["trainer_busy"].value == 0.8, "the share of the whole run, not the mean of shares so far"

    times = {p: p.stat().st_mtime_ns for p in (results / "first_loop").glob("*.json")}
    assert len(times) == 10
    capsys.readouterr()
    assert driver.main([*options, "--seed", "0", "--seed", "1", "--json"]) == 0
    assert {p: p.stat().st_mtime_ns for p in times} == times
    out = capsys.readouterr()
    assert "arm" not in out.err
    assert {json.loads(text)["figure"] for text in out.out.splitlines()} == set(figures)


def test_an_arm_alone_is_recorded_and_the_rest_is_listed(driver, place, capsys):
    results, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "2"]) == 0
    assert [p.name for p in (results / "first_loop").glob("*.json")] == ["prepare-seed2.json"]
    assert not (results / "first_loop.jsonl").exists()
    capsys.readouterr()
    assert driver.main([*options, "--list"]) == 0
    shown = capsys.readouterr().out
    assert "done, 0 min" in shown and "ready" in shown and "after" in shown


def test_an_arm_before_its_turn_names_what_is_missing(driver, place, capsys):
    _, options = place
    assert driver.main([*options, "--only-arm", "eval", "--seed", "0"]) == ConfigError.exit_code
    assert "needs prepare, rl, sft_continued first" in capsys.readouterr().err


def test_continued_sft_gets_the_wall_time_that_rl_took(driver, place, tmp_path):
    results, options = place
    arms = ["--only-arm", "prepare", "--only-arm", "rl", "--only-arm", "sft_continued"]
    assert driver.main([*options, *arms, "--seed", "0"]) == 0
    seconds = json.loads((results / "first_loop" / "rl-seed0.json").read_text())["stages"]["rl"]["seconds"]
    (made,) = (tmp_path / "runs").glob("*/sft_continued/made")
    assert made.read_text() == f"sft_continued {seconds}"


def test_fewer_tasks_than_the_claim_asks_for_never_meet_its_bar(driver, place):
    results, options = place
    assert driver.main([*options, "--seed", "0", "--set", "eval.tasks=60"]) == 0
    figures = {f.figure: f for f in read_figures(results / "first_loop.jsonl")}
    assert "bar: not tested, 48 tasks are fewer than 200" in (figures["rl_gain_points"].note or "")
    assert "not tested" not in (figures["unseen_family_gain_points"].note or "")


def test_hours_end_in_records_of_two_configurations_that_are_not_pooled(driver, place, capsys):
    results, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    other = ["--only-arm", "prepare", "--seed", "1", "--set", "rl.pace=3.0"]
    assert driver.main([*options, *other]) == ConfigError.exit_code
    told = capsys.readouterr().err.splitlines()[-1]
    assert "different configurations" in told and "seed 0: prepare" in told and "--restart --seed 0," in told
    assert not (results / "first_loop" / "prepare-seed1.json").exists()
    shutil.copy(results / "first_loop" / "prepare-seed0.json", results / "first_loop" / "prepare-seed1.json")
    path = results / "first_loop" / "prepare-seed1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seed": 1, "design": "another"}))
    assert driver.main([*options, "--pool", "--seed", "0"]) == ConfigError.exit_code
    assert "seed 1: prepare" in capsys.readouterr().err


def test_a_record_of_another_configuration_is_neither_skipped_nor_built_on(driver, place, capsys):
    results, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    for arm in ("prepare", "rl"):
        changed = [*options, "--only-arm", arm, "--seed", "0", "--set", "rl.pace=3.0"]
        capsys.readouterr()
        assert driver.main(changed) == ConfigError.exit_code
        told = capsys.readouterr().err
        assert "prepare-seed0.json was made with another configuration" in told and told.count("\n") == 1
        assert "add --restart --seed 0 --only-arm prepare" in told
    assert not (results / "first_loop" / "rl-seed0.json").exists()


def test_an_arm_that_builds_on_another_configuration_is_listed_as_ready(driver, place, capsys, monkeypatch):
    _, options = place
    monkeypatch.setenv("COLUMNS", "200")
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    capsys.readouterr()
    assert driver.main([*options, "--list", "--seed", "0", "--set", "rl.pace=3.0"]) == 0
    rows = [line.strip(" │┃").split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    standing = {arm.strip(): told.strip() for arm, told in rows}
    assert standing["prepare"] == "of another configuration"
    assert standing["rl"] == "prepare of another configuration"
    assert standing["sft_continued"] == "after rl; prepare of another configuration"
    assert "ready" not in standing.values()


def test_restart_makes_an_arm_and_what_builds_on_it_again_and_leaves_the_rest(
    driver, place, tmp_path, capsys
):
    results, options = place
    assert driver.main([*options, "--seed", "0"]) == 0
    (run,) = [p for p in (tmp_path / "runs").iterdir() if p.is_dir()]
    stages = ("sft", "rl", "rl_sync_1x1", "sft_continued", "eval")
    before = {stage: (run / stage).stat().st_ino for stage in stages}
    capsys.readouterr()
    restarted = [*options, "--seed", "0", "--restart", "--only-arm", "rl"]
    assert driver.main(restarted) == 0
    told = capsys.readouterr().err
    assert "removing the records of rl, sft_continued, eval and" in told
    found = results / "first_loop"
    assert {p.stem for p in found.glob("*.json")} == {"prepare-seed0", "rl-seed0", "rl_sync-seed0"}
    assert list((found / "evaluations").iterdir()) == [] and not (found / "eval-seed0").exists()
    assert {s for s in stages if (run / s).exists()} == {"sft", "rl", "rl_sync_1x1"}
    assert (run / "sft").stat().st_ino == before["sft"]
    assert driver.main([*options, "--seed", "0"]) == 0


def test_restart_mends_another_configuration_and_a_damaged_record(driver, place):
    results, options = place
    assert driver.main([*options, "--seed", "0"]) == 0
    (results / "first_loop" / "rl-seed0.json").write_text("{")
    again = [*options, "--seed", "0", "--set", "tasks.pace=1.0"]
    assert driver.main(again) == ConfigError.exit_code
    assert driver.main([*again, "--restart"]) == 0
    assert driver.main([*options, "--restart"]) == ConfigError.exit_code, "hours of work go only by name"


def test_a_run_folder_of_other_settings_names_a_mend_that_this_command_has(driver, place, capsys):
    results, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    (results / "first_loop" / "prepare-seed0.json").unlink()
    changed = [*options, "--only-arm", "prepare", "--seed", "0", "--set", "sft.budget_s=3.0"]
    capsys.readouterr()
    assert driver.main(changed) == ConfigError.exit_code
    told = capsys.readouterr().err.splitlines()[-1]
    assert "'sft' was finished with another configuration (budget_s: 0.0 -> 3.0)" in told
    assert "add --restart --seed 0 --only-arm prepare" in told and "--restart-from" not in told
    assert driver.main([*changed, "--restart"]) == 0


def test_a_recorded_arm_whose_models_are_gone_is_not_silently_trained_anew(driver, place, tmp_path, capsys):
    _, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    (run,) = [p for p in (tmp_path / "runs").iterdir() if p.is_dir()]
    shutil.rmtree(run)
    assert driver.main([*options, "--only-arm", "rl", "--seed", "0"]) == ConfigError.exit_code
    assert "'prepare' of seed 0 is recorded, but" in capsys.readouterr().err


def test_the_curves_of_an_arm_are_kept_beside_its_record(driver, place):
    results, options = place
    assert driver.main([*options, "--seed", "0"]) == 0
    found = results / "first_loop"
    assert len((found / "rl-seed0" / "rl.jsonl").read_text().splitlines()) == 5
    assert {p.name for p in (found / "rl_sync-seed0").iterdir()} == {"rl_sync_1x1.jsonl", "rl_sync_2x2.jsonl"}
    record = json.loads((found / "eval-seed0.json").read_text())
    assert "temperature-rl.json" in record["curves"]
    assert json.loads((found / "eval-seed0" / "temperature-rl.json").read_text()) == {"temperature": 0.7}


def test_a_long_curve_is_thinned_but_keeps_what_is_measured_rarely(driver, tmp_path):
    with MetricWriter(tmp_path / "sft", "sft") as out:
        for n in range(20_000):
            out.write(n / 3, n, train_loss=1 / (n + 1), **({"heldout_loss": 0.5} if n % 500 == 7 else {}))
    assert sys.modules["arms"].keep_curves([tmp_path / "sft"], tmp_path / "kept") == ["sft.jsonl"]
    assert (tmp_path / "kept" / "sft.jsonl").stat().st_size < 250_000
    kept = read_metrics(tmp_path / "kept" / "sft.jsonl")
    assert len(kept.series("heldout_loss")[0]) > 5 and kept.rows[-1]["step"] == 19_999


def test_a_damaged_record_is_named(driver, place, capsys):
    results, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    (results / "first_loop" / "prepare-seed0.json").write_text("{")
    assert driver.main([*options, "--pool"]) == CorruptArtifact.exit_code
    assert "--restart --seed 0 --only-arm prepare" in capsys.readouterr().err


def test_a_whole_run_is_compared_with_the_start_of_another(driver):
    fast, slow = [(t, 10.0 * t) for t in range(5)], [(t, 40.0 + t) for t in range(5, 45)]
    metrics = Metrics([{"t": 100.0 + t, "rollouts_trained": n} for t, n in (*fast, *slow)])
    assert driver.pace(metrics, 4.0) == (10.0, 4.0)
    assert driver.pace(metrics) == (84.0 / 44.0, 44.0)
    assert driver.pace(Metrics(metrics.rows[:1])) == (0.0, 0.0)


def test_a_later_version_of_the_recipe_spoils_what_was_shown(driver, place, capsys, tmp_path):
    results, options = place
    for seed in driver.FirstLoop.seeds:
        assert driver.main([*options, "--seed", str(seed)]) == 0
    shown = (results / "first_loop.jsonl").read_text()
    later = RECIPE.replace('"stages_made:Eval"', '"stages_made:Eval", tasks = 251')
    (tmp_path / "proof.toml").write_text(later)
    made = driver.FirstLoop(results, tmp_path / "runs", str(tmp_path / "proof.toml"))
    arms = made.arms
    capsys.readouterr()
    run = sys.modules["command"]._run
    run(made, arms, made.seeds, restart=False, seeds_given=False, asked=False)
    told = capsys.readouterr().err
    assert told.count("left as it is") == 3 and "arm " not in told
    assert [f.model_dump() for f in made.pool()] and (results / "first_loop.jsonl").read_text() == shown
    with pytest.raises(ConfigError, match="another configuration"):
        run(made, arms, made.seeds, restart=False, seeds_given=False, asked=True)

    folder = results / "first_loop"
    for path in folder.glob("*-seed2.json"):
        path.unlink()
    before = sorted(folder.glob("*.json"))
    capsys.readouterr()
    with pytest.raises(
        ConfigError, match="seed 0: prepare, .*seed 1: prepare, .*--restart --seed 0 --seed 1,"
    ):
        run(made, arms, made.seeds, restart=False, seeds_given=False, asked=False)
    with pytest.raises(ConfigError, match="seed 1: prepare, .*--restart --seed 1,"):
        run(made, arms, (0,), restart=True, seeds_given=True, asked=True)
    told = capsys.readouterr().err
    assert "arm " not in told and "removing" not in told and sorted(folder.glob("*.json")) == before
    run(made, arms[:1], (0, 1), restart=True, seeds_given=True, asked=True)
    run(made, arms[:1], made.seeds, restart=False, seeds_given=False, asked=False)
    assert {p.name for p in folder.glob("*.json")} == {f"prepare-seed{k}.json" for k in made.seeds}
    assert made.pool() == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.unlink(),
        lambda p: p.write_text(""),
        lambda p: p.write_text('{"x": 1}\n'),
        lambda p: p.write_text("{"),
    ],
)
@pytest.mark.parametrize("name", ["rl-seed0/rl.jsonl", "rl_sync-seed0/rl_sync_2x2.jsonl"])
def test_a_curve_that_is_gone_gives_another_figure(driver, place, capsys, damage, name):
    results, options = place
    assert driver.main([*options, "--seed", "0"]) == 0
    before = (results / "first_loop.jsonl").read_text()
    damage(results / "first_loop" / name)
    capsys.readouterr()
    assert driver.main([*options, "--pool"]) == CorruptArtifact.exit_code
    assert name.rsplit("/")[-1] in capsys.readouterr().err
    assert (results / "first_loop.jsonl").read_text() == before


@pytest.mark.parametrize(
    "change", [{"stages": None}, {"stages": {"rl": {}}}, {"curves": "rl.jsonl"}, {"design": 1}]
)
def test_a_record_that_was_written_by_hand_is_a_stack_trace(driver, place, capsys, change):
    results, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    path = results / "first_loop" / "prepare-seed0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for option in ("--list", "--pool"):
        assert driver.main([*options, option]) == CorruptArtifact.exit_code
    assert "is no record" in capsys.readouterr().err


def test_options_that_pool_does_not_read_are_taken_without_a_word(driver, place, capsys, tmp_path):
    _, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    for wrong in (["--restart"], ["--set", "eval.tasks=9"], ["--results", str(tmp_path / "none")]):
        assert driver.main([*options, "--pool", *wrong]) == ConfigError.exit_code
    assert capsys.readouterr().err.count("error: ") == 3
