"""The stage that moves the aliases: only what passed is served, and the record says why the rest is not."""

from __future__ import annotations

import json

import pytest
from runs_made import evaluation

from cadenza.core.errors import ConfigError
from cadenza.core.rundb import RunDatabase
from cadenza.pipelines import make_plan, run_plan


def gated(folder, **skills):
    """Runs the stage on results of policies with these skills; (figures, run id, database path)."""
    for name, skill in skills.items():
        for temperature, samples in ((0.7, 8), (0.0, 1)):
            result = evaluation(name, "heldout", 0, temperature, 120, samples, skill=skill)
            result.save(folder / "evaluate" / "evaluations" / f"{name}-heldout-{temperature}.json")
        (folder / name).mkdir()
    stage = {
        "name": "gate",
        "kind": "cadenza.pipelines.gate_stage:Gate",
        "candidates": list(skills),
        "inputs": {"evaluate": f"{folder}/evaluate", **{name: f"{folder}/{name}" for name in skills}},
    }
    outcome = run_plan(make_plan({"name": "r", "stage": [stage]}), folder / "runs" / "r")
    return outcome, folder / "runs" / "cadenza.db"


def test_a_better_policy_is_not_served_or_a_damaged_one_is(tmp_path):
    outcome, path = gated(tmp_path, sft=0.0, rl=1.0, damaged=-1.5)
    assert outcome.stages[0].figures == {"serving": "rl", "promoted": 2, "refused": 1}
    run = outcome.run_id
    with RunDatabase.open(path) as database:
        assert database.alias(f"{run}/serving") == (f"{run}/rl", 0)
        assert database.alias(f"{run}/candidate") == (f"{run}/damaged", 0)
        decisions = [e["data"] for e in database.events(run, "gate")]
    assert [(d["candidate"], d["baseline"], d["promote"]) for d in decisions] == [
        ("sft", "", True), ("rl", "sft", True), ("damaged", "rl", False),
    ]  # fmt: skip
    kept = json.loads((outcome.run_dir / "gate" / "damaged.json").read_text())
    assert kept == decisions[2] and not kept["promote"]
    assert "<failure" in (outcome.run_dir / "gate" / "damaged.xml").read_text()
    assert "<failure" not in (outcome.run_dir / "gate" / "rl.xml").read_text()


def test_a_candidate_that_is_no_input_is_a_stack_trace(tmp_path):
    stage = {
        "name": "gate",
        "kind": "cadenza.pipelines.gate_stage:Gate",
        "inputs": {"evaluate": f"{tmp_path}/", "sft": f"{tmp_path}/"},
        "candidates": ["rl"],
    }
    with pytest.raises(ConfigError, match="candidate 'rl' of stage 'gate' is no input of it; add inputs"):
        run_plan(make_plan({"name": "r", "stage": [stage]}), tmp_path / "runs" / "r")
