"""The stage must ask the same tasks of every policy, tune none on held-out tasks, and go on after a kill."""

from __future__ import annotations

import json
import logging

import pytest
from rollouts_made import task
from runs_made import evaluation

from cadenza.core.errors import ConfigError
from cadenza.core.progress import Progress
from cadenza.pipelines import evaluate_stage
from cadenza.pipelines.evaluate_stage import Evaluate, EvaluateConfig
from cadenza.pipelines.plan import plan_recipe
from cadenza.pipelines.stages import StageContext
from cadenza.tokens import Tokenizer

CONFIG = {
    "suites": [{"split": "heldout", "samples": 4}, {"split": "heldout_hard", "samples": 2, "greedy": False}],
    "temperatures": [0.3, 0.9],
    "policies": {"base": {"temperatures": [0.6], "samples": 1, "splits": ["heldout"], "greedy": False}},
    "services": {"placement": "in_process"},
}


class Silent:
    def log(self, *_args, **_values):
        pass


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Runs the stage with made-up results; gives what was evaluated: (policy, split, samples, temperature)."""
    for name in ("base", "sft"):
        (tmp_path / name).mkdir()
        Tokenizer.train(["def f():\n    return 1\n"] * 3, vocab_size=300).save(tmp_path / name)
    (tmp_path / "out").mkdir()
    done = []

    async def evaluated(self, tasks, _label, samples, temperature, suite):
        done.append((self.name, suite, samples, temperature))
        return evaluation(self.name, suite, 0, temperature, len(tasks), samples, skill=temperature * 9)

    monkeypatch.setattr(evaluate_stage._Runner, "evaluate", evaluated)
    monkeypatch.setattr(
        evaluate_stage,
        "load_tasks",
        lambda folder: [task(f"{folder.name}-{i}", folder.name) for i in range(5)],
    )

    def go(config=CONFIG):
        artifacts = {"tasks": tmp_path / "tasks", "base": tmp_path / "base", "sft": tmp_path / "sft"}
        context = StageContext(
            "evaluate", tmp_path, tmp_path / "out", False, "r", "r/evaluate", 0,
            None, Silent(), Progress(), logging.getLogger("cadenza"), artifacts,  # type: ignore[arg-type]
        )  # fmt: skip
        before = len(done)
        Evaluate(EvaluateConfig.model_validate(config)).run(context)
        return done[before:]

    return go


def test_a_policy_may_be_asked_for_less_but_for_the_same_tasks(stage):
    done = stage()
    assert [entry for entry in done if entry[0] == "base"] == [("base", "heldout", 1, 0.6)]
    assert [entry[1:] for entry in done if entry[0] == "sft"] == [
        ("val", 4, 0.3), ("val", 4, 0.9), ("heldout", 4, 0.9), ("heldout", 1, 0.0), ("heldout_hard", 2, 0.9),
    ]  # fmt: skip


def test_the_table_a_temperature_was_chosen_from_is_kept_and_asked_for_once(stage, tmp_path):
    stage()
    kept = json.loads((tmp_path / "out" / "temperature-sft.json").read_text())
    assert kept["temperature"] == 0.9 and kept["split"] == "val" and kept["tasks"] == 5
    assert [row["temperature"] for row in kept["tried"]] == [0.3, 0.9]
    assert kept["tried"][0]["pass_at_1"] < kept["tried"][1]["pass_at_1"]
    assert stage() == []


@pytest.mark.parametrize("torn", ["", '{"temp', "[]", '{"temperature": null}'])
def test_a_torn_temperature_file_is_made_again(stage, tmp_path, torn):
    stage()
    (tmp_path / "out" / "temperature-sft.json").write_text(torn)
    assert [entry[1] for entry in stage()] == ["val", "val"]
    assert json.loads((tmp_path / "out" / "temperature-sft.json").read_text())["temperature"] == 0.9


def test_a_table_of_a_policy_that_is_no_input_or_of_an_unknown_split_is_refused(stage):
    with pytest.raises(ConfigError, match=r"unknown key 'evaluate\.policies\.bsae'; did you mean 'base'"):
        stage({**CONFIG, "policies": {"bsae": {}}})
    with pytest.raises(ValueError, match="names 'hidden', which no suite has"):
        EvaluateConfig.model_validate({**CONFIG, "policies": {"base": {"splits": ["hidden"]}}})


@pytest.mark.parametrize(
    ("recipe", "stage_name", "base"),
    [("demo", "evaluate", "long"), ("demo-quick", "evaluate", "long"), ("proof", "eval", "cpt")],
)
def test_shipped_recipes_evaluate_the_base_beside_sft_and_rl(recipe, stage_name, base):
    planned = plan_recipe(recipe).stage_named(stage_name)
    assert {"base": base, "sft": "sft", "rl": "rl"}.items() <= planned.inputs.items()
    assert isinstance(planned.config, EvaluateConfig) and set(planned.config.policies) == {"base"}
