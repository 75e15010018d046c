"""A plan refuses every mistake in a recipe before anything runs, in one line that names the key."""

import pytest

from cadenza.core.config import differences
from cadenza.core.errors import ConfigError, MissingArtifact
from cadenza.evaluation.statistics import least_shown, tasks_for
from cadenza.pipelines import make_plan, plan_recipe
from cadenza.pipelines.plan import recipe_folders

NUMBERS = {"name": "numbers", "kind": "example_stages:Numbers"}
SUM = {"name": "sum", "kind": "example_stages:Sum"}


def plan(*stages, **top):
    return make_plan({"name": "r", **top, "stage": list(stages)})


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"name": "a"}], "key 'a.kind' is missing"),
        ([{"name": "a", "kind": "example_stages"}], "is not an import path"),
        ([{"name": "a", "kind": "no_such_module:A"}], "cannot be imported: No module named 'no_such_module'"),
        ([{"name": "a", "kind": "example_stages:Number"}], "did you mean 'Numbers'"),
        (
            [{"name": "a", "kind": "example_stages:NotAStage"}],
            "is no stage; derive it from cadenza.pipelines.Stage",
        ),
        ([{**NUMBERS, "cuont": 3}], "unknown key 'numbers.cuont'; did you mean 'count'"),
        ([{**NUMBERS, "count": "three"}], "key 'numbers.count' = 'three' cannot be used"),
        ([{**NUMBERS, "seed": "x"}], "key 'numbers.seed' = 'x' is not a whole number"),
        ([SUM], "input 'numbers' of stage 'sum' is 'numbers', which is no earlier stage"),
        ([SUM, NUMBERS], "no earlier stage; set sum.inputs.numbers to one of: none"),
        ([NUMBERS, {**SUM, "inputs": {"numbers": "nubmers"}}], "is 'nubmers', which is no earlier stage"),
        ([NUMBERS, {**SUM, "inputs": "numbers"}], "key 'sum.inputs' is not a table of texts"),
        ([{**NUMBERS, "inputs": {"x": "y"}}], "unknown key 'numbers.inputs.x'; known keys: none"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(stages, message):
    with pytest.raises(ConfigError, match=message) as failure:
        plan(*stages)
    assert "\n" not in str(failure.value)


def test_an_unknown_top_level_key_is_refused():
    with pytest.raises(ConfigError, match="unknown key 'sed'; did you mean 'seed'"):
        plan(NUMBERS, sed=1)


def test_a_seed_that_the_run_database_cannot_hold_passes_the_dry_run():
    for seed in (-(2**63), 2**63 - 1):
        assert [stage.seed for stage in plan(NUMBERS, {**SUM, "seed": seed}, seed=seed).stages] == [seed] * 2
    for seed in (-(2**63) - 1, 2**63, 2**64, 10**400):
        with pytest.raises(
            ConfigError, match="key 'seed' = .* cannot be used: .* equal to -?92233720368547758"
        ):
            plan(NUMBERS, seed=seed)
        with pytest.raises(
            ConfigError, match=r"key 'numbers\.seed' = .* cannot be used: .* to 9223372036854775807"
        ):
            plan({**NUMBERS, "seed": seed})


def test_the_digest_follows_configuration_seed_and_inputs_but_not_operational_keys():
    def digests(*stages, **top):
        return [stage.digest for stage in plan(*stages, **top).stages]

    base = digests(NUMBERS, SUM)
    assert digests({**NUMBERS, "threads": 8}, SUM) == base
    changed = digests({**NUMBERS, "count": 4}, SUM)
    assert changed[0] != base[0] and changed[1] != base[1]
    assert digests(NUMBERS, SUM, seed=1)[0] != base[0]
    pinned = {**NUMBERS, "seed": 5}
    assert digests(pinned, seed=1) == digests(pinned, seed=2)


def test_dependents_follow_the_inputs_and_nothing_else():
    stages = [
        NUMBERS,
        {**NUMBERS, "name": "other"},
        SUM,
        {**SUM, "name": "both", "inputs": {"numbers": "other", "x": "sum"}},
    ]
    assert plan(*stages).dependents("numbers") == ["numbers", "sum", "both"]
    assert plan(*stages).dependents("other") == ["other", "both"]


def test_the_resolved_recipe_plans_to_the_same_digests(tmp_path):
    first = plan({**NUMBERS, "count": 7, "seed": 4}, SUM, seed=2, needs_disk_gb=0.5)
    path = tmp_path / "resolved.toml"
    path.write_text(first.toml())
    second = plan_recipe(str(path))
    assert [s.digest for s in second.stages] == [s.digest for s in first.stages]
    assert second.resolved() == first.resolved()


def test_an_input_may_lie_elsewhere():
    planned = plan({**SUM, "inputs": {"numbers": "./elsewhere/numbers"}}).stages[0]
    assert str(planned.inputs["numbers"]) == "elsewhere/numbers"


def test_every_shipped_recipe_plans_and_what_it_resolves_to_plans_the_same(tmp_path):
    shipped = recipe_folders()[-1]
    names = [path.stem for path in shipped.glob("*.toml")]
    assert {"base", "demo", "demo-quick", "demo-base", "proof"} <= set(names)
    for name in names:
        first = plan_recipe(name)
        (tmp_path / f"{name}.toml").write_text(first.toml())
        second = plan_recipe(str(tmp_path / f"{name}.toml"))
        assert [s.digest for s in second.stages] == [s.digest for s in first.stages]


def test_synchronous_rl_of_the_proof_is_the_same_run_but_for_overlap_and_length():
    stages = {stage.name: stage for stage in plan_recipe("proof", ["seed=2"]).stages}
    for name in ("rl_sync_1x1", "rl_sync_2x2"):
        changed = differences(stages["rl"].settings, stages[name].settings)
        keys = {text.partition(":")[0] for text in changed}
        assert keys <= {"synchronous", "synchronous_threads", "max_steps", "max_seconds"}
        assert "synchronous" in keys


def test_rl_of_the_proof_ends_within_25_minutes_with_room_for_its_last_step():
    assert plan_recipe("proof").stage_named("rl").settings["max_seconds"] <= 25 * 60 - 60


@pytest.mark.parametrize("recipe", ["demo", "demo-quick"])
@pytest.mark.parametrize("stage", ["cpt", "sft", "rl", "evaluate"])
def test_a_report_is_made_again_with_every_stage_it_shows(recipe, stage):
    assert "report" in plan_recipe(recipe).dependents(stage)


@pytest.mark.parametrize("recipe", ["demo", "demo-quick", "proof-loop"])
def test_a_gate_of_a_shipped_recipe_refuses_the_same_outcomes(recipe):
    stages = {stage.name: stage.settings for stage in plan_recipe(recipe).stages}
    count = {split: table["count"] for split, table in stages["tasks"]["splits"].items()}
    realtime = stages["realtime"]
    gates = {"realtime": min(realtime["gate_tasks"], count[realtime["gate_split"]])}
    if "gate" in stages:
        suites = stages["evaluate"]["suites"]
        gates["gate"] = sum(min(s["tasks"] or count[s["split"]], count[s["split"]]) for s in suites)
    for stage, tasks in gates.items():
        assert least_shown(tasks) < stages[stage]["gate"]["margin"], f"{stage}: {tasks} tasks"
    if recipe == "demo":
        assert gates["realtime"] == tasks_for(realtime["gate"]["margin"])
    canary, asked = realtime["canary"], realtime["canary_tasks"]
    assert canary["least"] <= canary["enough"] <= asked / 3, "an arm may get a third of the users"
    assert realtime["answers"] + asked < count[realtime["split"]]


@pytest.mark.parametrize("recipe", ["demo", "demo-quick", "proof-loop"])
def test_a_round_trains_without_the_routes_that_rl_replays_or_at_a_rate_of_rl(recipe):
    from cadenza.pipelines.realtime_stage import RealtimeConfig

    step = plan_recipe(recipe).stage_named("realtime").settings["step"]
    wanted = RealtimeConfig().step.model_copy(update={"router_replay": "filtered"})
    assert step == wanted.model_dump(mode="json")


def test_tasks_of_the_proof_are_the_same_for_every_seed_and_not_those_of_a_demo():
    seeds = {plan_recipe("proof", [f"seed={seed}"]).stage_named("tasks").seed for seed in range(3)}
    assert seeds == {1000} and plan_recipe("demo").stage_named("tasks").seed == 0


def test_another_base_in_the_same_folder_makes_work_on_the_older_one_stale(tmp_path):
    stage = {
        "name": "base",
        "kind": "cadenza.pipelines.base_stage:ShippedBase",
        "directory": str(tmp_path),
    }

    def planned():
        return plan(stage).stages[0]

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = planned()
    assert planned().digest == first.digest
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert planned().digest != first.digest
    assert [line for line in differences(first.settings, planned().settings) if "reads" in line]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a\0b", "two\nlines", "x" * 101])
def test_a_name_that_is_no_folder_s_makes_a_run_elsewhere(name):
    with pytest.raises(ConfigError, match=r"key 'name' = .* it names a folder"):
        make_plan({"name": name})


def test_a_run_needs_less_than_nothing():
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="key 'needs_disk_gb' = "):
            make_plan({"name": "r", "needs_disk_gb": value})


def test_an_input_that_is_not_there_is_found_after_the_stages_before_it_have_run(tmp_path):
    planned = plan({**SUM, "inputs": {"numbers": f"{tmp_path}/nowhere"}})
    with pytest.raises(
        MissingArtifact, match=r"input 'numbers' of stage 'sum' is not at .*/nowhere; check the path"
    ):
        planned.require_inputs()


@pytest.mark.parametrize(
    ("source", "place", "message"),
    [
        ("x = 1\nraise RuntimeError('no\\nluck')\n", "{module}.py, line 2", "RuntimeError: no luck"),
        ("def f(:\n", "{module}.py, line 1", "SyntaxError: invalid syntax"),
        ("from json import nothing_of_this\n", "{module}.py, line 1", "ImportError: cannot import name"),
        ("import json\n\njson.loads('{')\n", "{module}.py, line 3", "JSONDecodeError: Expecting"),
        ("import sys\nsys.exit()\n", "{module}.py, line 2", "SystemExit"),
        ("x = 1\0\n", "", "null bytes"),
    ],
    ids=["raises", "syntax", "name", "call", "exit", "null"],
)
def test_a_module_of_the_users_that_fails_is_told_as_a_defect_of_cadenza(
    source, place, message, tmp_path, monkeypatch, request
):
    module = f"failing_{request.node.callspec.id}"  # a name of its own: Python remembers modules
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as failure:
        plan({"name": "a", "kind": f"{module}:A"})
    assert f"module '{module}' of stage 'a' fails when it is imported" in failure.value.cause
    assert place.format(module=tmp_path / module) in failure.value.cause and message in failure.value.cause
    assert failure.value.mend == "correct the module, or name another in kind"
    assert "\n" not in str(failure.value)
