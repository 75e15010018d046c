"""The stage that moves the aliases: only what passed is served, and the record says why the rest is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs_made import evaluation

from cadenza.core.errors import ConfigError, ForeignSample
from cadenza.core.rundb import RunDatabase
from cadenza.core.types import Policy
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
        aliases = {a.alias: (a.stage, a.version) for a in database.aliases(run)}
        assert aliases == {"serving": ("rl", 0), "candidate": ("damaged", 0)}
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


def judged(folder: Path, known: list[Policy], digests: tuple[str, str]) -> tuple[Policy, list[Policy]]:
    """Runs the stage on one policy, its sampled and its greedy result of weights with these digests; ``known``: what an
    RL run of that name recorded. The policy that is served then, and all that are recorded."""
    for digest, temperature in zip(digests, (0.7, 0.0), strict=True):
        result = evaluation("rl", "heldout", 0, temperature, 20, 1, skill=1.0)
        path = folder / "evaluate" / "evaluations" / f"rl-heldout-{temperature}.json"
        result.model_copy(update={"policy_digest": digest}).save(path)
    (folder / "rl").mkdir()
    gate = {"name": "gate", "kind": "cadenza.pipelines.gate_stage:Gate", "candidates": ["rl"]}
    gate["inputs"] = {"evaluate": f"{folder}/evaluate", "rl": f"{folder}/rl"}
    run_dir = folder / "runs" / "r"
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text('{"format": 1, "id": "run"}')
    with RunDatabase.open(folder / "runs" / "cadenza.db") as database:
        for policy in known:
            database.add_policy("run/rl", policy)
        run_plan(make_plan({"name": "r", "stage": [gate]}), run_dir)
        (serving,) = [alias for alias in database.aliases("run") if alias.alias == "serving"]
        policies = database.policies("run/rl")
    (served,) = [p for p in policies if p.version == serving.version]
    assert (serving.stage, serving.digest) == ("rl", served.digest)
    return served, policies


def test_the_alias_does_not_say_which_weights_were_judged(tmp_path):
    (tmp_path / "a").mkdir()
    served, policies = judged(tmp_path / "a", [], ("d1", "d1"))
    assert policies == [served] == [Policy("rl", 0, None, "d1")]
    (tmp_path / "b").mkdir()
    known = [Policy("policy", 0, None, "d0"), Policy("policy", 1, 0, "d1"), Policy("policy", 2, 1, "d2")]
    served, policies = judged(tmp_path / "b", known, ("d1", "d1"))
    assert served == known[1] and policies == known
    (tmp_path / "c").mkdir()
    served, policies = judged(tmp_path / "c", known, ("another dtype", ""))
    assert served == Policy("policy", 2, 1, "another dtype") and policies == [*known[:2], served]
    (tmp_path / "d").mkdir()
    with pytest.raises(ForeignSample, match="'rl' was evaluated on weights d1 and d2"):
        judged(tmp_path / "d", [], ("d2", "d1"))


def test_a_gate_that_lets_nothing_through_leaves_what_an_earlier_attempt_served(tmp_path):
    evaluation("rl", "heldout", 0, 0.7, 20, 1).save(tmp_path / "evaluate" / "evaluations" / "rl-heldout.json")
    (tmp_path / "rl").mkdir()
    gate = {"name": "gate", "kind": "cadenza.pipelines.gate_stage:Gate", "candidates": ["rl"]}
    gate |= {"inputs": {"evaluate": f"{tmp_path}/evaluate", "rl": f"{tmp_path}/rl"}}
    run_dir = tmp_path / "runs" / "r"
    outcome = run_plan(make_plan({"name": "r", "stage": [gate]}), run_dir)
    strict = gate | {"gate": {"must_pass": ["no such task"]}}
    run_plan(make_plan({"name": "r", "stage": [strict]}), run_dir, restart_from="gate")
    with RunDatabase.open(tmp_path / "runs" / "cadenza.db") as database:
        assert [a.alias for a in database.aliases(outcome.run_id)] == ["candidate"]
