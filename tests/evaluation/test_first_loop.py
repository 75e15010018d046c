"""The proof takes hours: no finished arm may be lost, run twice, skipped silently or pooled with a stranger."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from cadenza.core.errors import ConfigError, CorruptArtifact
from cadenza.evaluation.figures import read_figures

PATH = Path(__file__).parents[2] / "experiments" / "first_loop.py"
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
    spec = importlib.util.spec_from_file_location("first_loop", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["first_loop"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["first_loop"]


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
        "unseen_family_gain_points", "trainer_busy", "engine_busy", "env_busy", "async_vs_sync",
    }  # fmt: skip
    gain = figures["rl_gain_points"]
    assert gain.seeds == (0, 1) and gain.n == 48 and gain.interval and gain.interval[0] > 0
    assert "bar: at least 8 and interval above 0: met" in (gain.note or "")
    assert figures["unseen_family_gain_points"].n == 12
    assert figures["async_vs_sync"].value == 1.5 and figures["async_vs_sync"].peer_value == 8.0
    assert figures["trainer_busy"].value == 0.8

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


def test_records_of_two_configurations_are_not_pooled(driver, place, capsys):
    _, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    other = ["--only-arm", "prepare", "--seed", "1", "--set", "rl.pace=3.0"]
    assert driver.main([*options, *other]) == ConfigError.exit_code
    assert "different configurations" in capsys.readouterr().err


def test_a_damaged_record_is_named(driver, place):
    results, options = place
    assert driver.main([*options, "--only-arm", "prepare", "--seed", "0"]) == 0
    (results / "first_loop" / "prepare-seed0.json").write_text("{")
    assert driver.main([*options, "--pool"]) == CorruptArtifact.exit_code
