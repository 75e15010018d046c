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


def judged(
    folder: Path, known: list[Policy], digests: tuple[str, str], model: Path | None = None
) -> tuple[Policy, list[Policy]]:
    """Runs the stage on one policy, its sampled and its greedy result of weights with these digests; ``known``: what an
    RL run of that name recorded; ``model``: of the policy. The one that is served then, and all that are recorded."""
    for digest, temperature in zip(digests, (0.7, 0.0), strict=True):
        result = evaluation("rl", "heldout", 0, temperature, 20, 1, skill=1.0)
        path = folder / "evaluate" / "evaluations" / f"rl-heldout-{temperature}.json"
        result.model_copy(update={"policy_digest": digest}).save(path)
    (folder / "rl").mkdir()
    gate = {"name": "gate", "kind": "cadenza.pipelines.gate_stage:Gate", "candidates": ["rl"]}
    gate["inputs"] = {"evaluate": f"{folder}/evaluate", "rl": str(model or folder / "rl")}
    run_dir = folder / "runs" / "r"
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text('{"format": 1, "id": "run"}')
    with RunDatabase.open(folder / "runs" / "cadenza.db") as database:
        for policy in known:
            database.add_policy("run/rl", policy)
        plan = make_plan({"name": "r", "stage": [gate]})
        try:
            run_plan(plan, run_dir)
            run_plan(plan, run_dir, restart_from="gate")  # records nothing more
        except ForeignSample:
            assert database.policies("run/rl") == known and not database.aliases("run")
            raise
        (serving,) = [alias for alias in database.aliases("run") if alias.alias == "serving"]
        policies = database.policies("run/rl")
    (served,) = [p for p in policies if p.version == serving.version]
    assert (serving.stage, serving.digest) == ("rl", served.digest)
    return served, policies


def known(newest: str) -> list[Policy]:
    return [Policy("policy", 0, None, "d0"), Policy("policy", 1, 0, "d1"), Policy("policy", 2, 1, newest)]


@pytest.mark.needs_train
def test_the_alias_does_not_say_which_weights_were_judged(tmp_path, small_model):
    import torch

    from cadenza.model.digest import served_digest

    half, full = (served_digest(small_model, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert half != full
    for folder in "abcd":
        (tmp_path / folder).mkdir()
    served, policies = judged(tmp_path / "a", [], (full, full), small_model)
    assert policies == [served] == [Policy("rl", 0, None, full)]
    served, policies = judged(tmp_path / "b", known(half), (half, ""), small_model)
    assert served == known(half)[-1] and policies == known(half)
    # RL served another dtype than the evaluation: its own row stays.
    served, policies = judged(tmp_path / "c", known(half), (full, full), small_model)
    assert served == Policy("rl", 3, 2, full) and policies == [*known(half), served]
    with pytest.raises(ForeignSample, match="'rl' was evaluated on weights d1 and d2"):
        judged(tmp_path / "d", [], ("d2", "d1"))


@pytest.mark.needs_train
@pytest.mark.parametrize("digest", ["of another run", "d1"])
def test_weights_are_served_that_the_evaluation_did_not_judge(tmp_path, small_model, digest):
    """Neither those of another run nor those of an earlier version are the artifact's."""
    with pytest.raises(ForeignSample, match=f"candidate 'rl' has weights .* evaluated on {digest}"):
        judged(tmp_path, known("d2"), (digest, digest), small_model)


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
