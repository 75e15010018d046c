"""The runner goes on where it stopped, refuses what would mix two configurations, and loses nothing complete."""

import json
import re
import shutil
import subprocess
import sys
import threading

import pytest

from cadenza.core.errors import ConfigError, CorruptArtifact, MissingArtifact, ResourceExhausted, ServiceDied
from cadenza.core.rundb import RunDatabase
from cadenza.core.telemetry import read_lines
from cadenza.core.types import Policy
from cadenza.pipelines import make_plan, run_plan
from cadenza.pipelines.overview import list_runs
from cadenza.pipelines.run_folder import RunFolder
from cadenza.pipelines.runner import Interrupted


def skipped(outcome):
    return [stage.name for stage in outcome.stages if stage.skipped]


def test_a_finished_run_does_nothing_again_and_tells_the_same_figures(run):
    first, second = run(), run()
    assert skipped(first) == []
    assert skipped(second) == ["numbers", "sum", "counter", "again"]
    assert [s.figures for s in first.stages] == [s.figures for s in second.stages]
    assert first.stages[1].figures == {"sum": 3}
    assert (first.run_dir / "sum" / "sum.txt").read_text() == "3"


def test_the_database_and_the_metrics_tell_what_ran(run):
    outcome = run()
    with RunDatabase.open(outcome.run_dir.parent / "cadenza.db") as database:
        (record,) = database.runs()
        assert (record.name, record.status, record.directory) == ("example", "finished", outcome.run_dir)
        stages = database.stages(outcome.run_id)
        assert [(s.name, s.status) for s in stages] == [(s.name, "finished") for s in outcome.stages]
        assert stages[0].figures == {"count": 3}
        assert len(database.ledger(f"{outcome.run_id}/counter", "trained")) == 5
    assert [r["count"] for r in read_lines(outcome.run_dir / "metrics.jsonl", "numbers")] == [3]
    assert "kind = " in (outcome.run_dir / "recipe.toml").read_text()


def test_a_changed_configuration_of_a_finished_stage_is_refused_before_anything_runs(run):
    outcome = run(only=("numbers", "sum"))
    with pytest.raises(ConfigError) as failure:
        run(numbers={"count": 5})
    assert failure.value.cause == "stage 'numbers' was finished with another configuration (count: 3 -> 5)"
    assert failure.value.mend.startswith("add --restart-from numbers")
    assert not (outcome.run_dir / "counter").exists()


def test_restart_from_makes_the_stage_and_its_readers_again_and_nothing_else(run):
    run()
    outcome = run(numbers={"count": 5}, restart_from="numbers")
    assert skipped(outcome) == ["counter"]
    assert outcome.stages[1].figures == {"sum": 10}
    with pytest.raises(ConfigError, match="did you mean 'numbers'"):
        run(restart_from="number")


@pytest.mark.parametrize("flags", [{"restart_from": "numbers"}, {"fresh": True}])
def test_who_gives_the_same_command_again_loses_what_a_restart_has_made(run, flags, monkeypatch):
    run()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("example_stages.Sum.run", stop)
    with pytest.raises(
        Interrupted, match=r"run the same command without --(restart-from|fresh) again to go on"
    ):
        run(**flags)
    monkeypatch.undo()
    assert "numbers" in skipped(run())


def test_an_operational_key_may_change_at_any_time(run):
    run()
    assert skipped(run(numbers={"threads": 4})) == ["numbers", "sum", "counter", "again"]


def test_fresh_begins_another_run_in_the_same_folder(run):
    first, second = run(), run(fresh=True)
    assert first.run_id != second.run_id
    assert skipped(second) == []


def test_resume_needs_a_run(run):
    with pytest.raises(MissingArtifact, match="no run to resume"):
        run(resume=True)
    run()
    run(resume=True)


def test_an_interrupted_stage_goes_on_at_its_step(run):
    with pytest.raises(Interrupted) as failure:
        run(counter={"stop_at": 4, "fault": "interrupt"})
    assert failure.value.exit_code == 130
    assert str(failure.value) == "interrupted in stage 'counter'; run the same command again to go on"
    outcome = run()
    assert skipped(outcome) == ["numbers", "sum"]
    assert outcome.stages[2].figures == {"steps": 5, "begun_at": 3}


def test_a_begun_resumable_stage_is_not_continued_with_another_configuration(run):
    with pytest.raises(ServiceDied):
        run(counter={"stop_at": 4, "fault": "service"})
    with pytest.raises(
        ConfigError, match=r"stage 'counter' was begun with another configuration \(steps: 5 -> 6\)"
    ):
        run(counter={"steps": 6})
    outcome = run(counter={"steps": 6}, restart_from="counter")
    assert outcome.stages[2].figures == {"steps": 6, "begun_at": 0}


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("service", ServiceDied, "the engine ended"),
        ("defect", ZeroDivisionError, "a defect"),
        (
            "torch",
            ConfigError,
            r"stage 'counter' needs torch, which is not installed; in the checkout: make install",
        ),
        ("memory", ResourceExhausted, "stage 'counter' ran out of memory"),
        ("torch_memory", ResourceExhausted, "stage 'counter' ran out of memory"),
        ("engine_memory", ResourceExhausted, "stage 'counter' ran out of memory"),
        ("checkpoint", CorruptArtifact, "it is torn; add --restart-from counter to begin the stage again"),
    ],
)
def test_a_failure_is_recorded_and_the_next_run_goes_on(run, fault, error, message):
    with pytest.raises(error, match=message):
        run(counter={"stop_at": 3, "fault": fault})
    outcome = run()
    assert outcome.stages[2].figures["begun_at"] == 2
    assert outcome.stages[2].seconds > 0


def test_the_reason_of_a_failure_stands_in_the_database(run, tmp_path):
    with pytest.raises(ServiceDied):
        run(counter={"stop_at": 3, "fault": "service"})
    with RunDatabase.open(tmp_path / "runs" / "cadenza.db") as database:
        (record,) = database.runs()
        assert record.status == "failed"
        assert (database.stages(record.id)[-1].status, database.stages(record.id)[-1].reason) == (
            "failed",
            "the engine ended; run the same command again to go on",
        )


def test_a_corrupt_input_stops_the_stage_that_would_read_it(run, tmp_path):
    run(only=("numbers",))
    (tmp_path / "runs/example/numbers/numbers.txt").write_text("0\n1\n9")
    with pytest.raises(CorruptArtifact, match=r"numbers\.txt was changed .*--restart-from numbers"):
        run()
    assert run(restart_from="numbers").stages[1].figures == {"sum": 3}


def test_a_torn_or_missing_manifest_names_the_stage_to_make_again(run, tmp_path):
    run()
    manifest = tmp_path / "runs/example/sum/manifest.json"
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(CorruptArtifact, match=r"manifest\.json is not JSON.*--restart-from sum"):
        run()
    manifest.unlink()
    with pytest.raises(CorruptArtifact, match=r"no artifact at .*--restart-from sum"):
        run()


def test_a_removed_artifact_is_made_again_and_its_readers_stay_if_it_is_the_same(run, tmp_path):
    import shutil

    run()
    shutil.rmtree(tmp_path / "runs/example/numbers")
    assert skipped(run()) == ["sum", "counter", "again"]


def test_a_record_that_a_crash_left_behind_is_mended_from_the_manifest(run, tmp_path):
    outcome = run()
    with RunDatabase.open(tmp_path / "runs" / "cadenza.db") as database:
        database.start_stage(outcome.run_id, "sum", 1, "x", {})
    run()
    with RunDatabase.open(tmp_path / "runs" / "cadenza.db") as database:
        assert database.stages(outcome.run_id)[1].status == "finished"


def test_an_artifact_made_elsewhere_can_be_an_input(run, tmp_path):
    outcome = run(only=("numbers",))
    source = f"{outcome.run_dir}/numbers"
    stage = {"name": "sum", "kind": "example_stages:Sum", "inputs": {"numbers": source}}
    other = run_plan(make_plan({"name": "other", "stage": [stage]}), tmp_path / "runs" / "other")
    assert other.stages[0].figures == {"sum": 3}
    missing = {**stage, "inputs": {"numbers": f"{tmp_path}/nix"}}
    with pytest.raises(MissingArtifact, match="input 'numbers' of stage 'sum' is not at"):
        run_plan(make_plan({"name": "third", "stage": [missing]}), tmp_path / "runs" / "third")


def test_an_input_made_elsewhere_that_has_changed_is_told(run, tmp_path):
    outcome = run(only=("numbers",))
    stage = {"name": "sum", "kind": "example_stages:Sum", "inputs": {"numbers": f"{outcome.run_dir}/numbers"}}
    plan = make_plan({"name": "other", "stage": [stage]})
    run_plan(plan, tmp_path / "runs" / "other")
    run(only=("numbers",), numbers={"count": 9}, restart_from="numbers")
    with pytest.raises(ConfigError, match="stage 'sum' was made from other inputs than there are now"):
        run_plan(plan, tmp_path / "runs" / "other")


def test_a_stage_is_thrown_away_before_what_it_reads_was_found_whole(run):
    outcome = run()
    (victim,) = [p for p in (outcome.run_dir / "numbers").iterdir() if p.name != "manifest.json"]
    victim.write_bytes(b"\0" + victim.read_bytes()[1:])
    with pytest.raises(CorruptArtifact, match="was changed after it was written"):
        run(restart_from="again")
    assert (outcome.run_dir / "again").is_dir()


@pytest.mark.parametrize("flags", [{"fresh": True}, {"restart_from": "numbers"}])
def test_a_run_is_thrown_away_before_its_database_could_be_opened(run, flags):
    outcome = run()
    (outcome.run_dir.parent / "cadenza.db").write_bytes(b"no database" * 100)
    with pytest.raises(CorruptArtifact, match="is not a readable run database"):
        run(**flags)
    assert all((outcome.run_dir / name).is_dir() for name in ("numbers", "sum", "counter", "again"))


def test_two_processes_never_run_the_same_folder(run, tmp_path):
    import os

    folder = RunFolder(tmp_path / "runs" / "example")
    with folder.lock():
        with pytest.raises(ConfigError, match=f"is being run by process {os.getpid()}"):
            run()
    run()


def test_whoever_looks_at_a_run_keeps_it_from_beginning(tmp_path):
    folder, done = RunFolder(tmp_path / "r"), threading.Event()
    with folder.lock():
        assert folder.in_use()

    def look():
        while not done.is_set():
            folder.in_use()

    onlookers = [threading.Thread(target=look) for _ in range(2)]
    for thread in onlookers:
        thread.start()
    try:
        for _ in range(100):
            with folder.lock():
                pass
    finally:
        done.set()
        for thread in onlookers:
            thread.join(30)


def test_a_folder_with_other_files_is_never_touched(run, tmp_path):
    (tmp_path / "runs" / "example").mkdir(parents=True)
    (tmp_path / "runs" / "example" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files that are not a run's"):
        run(fresh=True)
    assert (tmp_path / "runs" / "example" / "thesis.txt").read_text() == "mine"


def test_a_recipe_that_needs_more_than_the_machine_has_does_not_start(tmp_path):
    table = {"name": "r", "stage": [{"name": "numbers", "kind": "example_stages:Numbers"}]}
    for key, message in (
        ("needs_memory_gb", "needs 1e.06 GB of memory"),
        ("needs_disk_gb", "needs 1e.06 GB of disk"),
    ):
        with pytest.raises(ResourceExhausted, match=message):
            run_plan(make_plan({**table, key: 1e6}), tmp_path / "runs" / "r")
    assert not (tmp_path / "runs").exists()


def test_a_recipe_without_stages_says_so(tmp_path):
    with pytest.raises(ConfigError, match="has no stages"):
        run_plan(make_plan({"name": "empty"}), tmp_path / "runs" / "empty")


def test_seeds_differ_by_use_and_not_by_run(run, tmp_path):
    from cadenza.pipelines.stages import StageContext

    def context(seed):
        return StageContext("n", tmp_path, tmp_path, False, "r", "r/n", seed, *[None] * 4, {})  # type: ignore[arg-type]

    assert context(1).seed_for("data") == context(1).seed_for("data")
    assert len({context(1).seed_for("data"), context(1).seed_for("init"), context(2).seed_for("data")}) == 3


def test_a_plan_imports_neither_torch_nor_sqlalchemy(command_environment):
    code = (
        "import sys; from cadenza.pipelines import make_plan; "
        "make_plan({'name': 'r', 'stage': [{'name': 'n', 'kind': 'example_stages:NeedsTorch'}]}); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'sqlalchemy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=command_environment, check=False).returncode == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "lock", "recipe.toml"])
def test_a_folder_where_a_file_belongs_is_reported_as_a_defect(run, name, capsys):
    from cadenza.cli.failures import report

    path = run().run_dir / name
    path.unlink()
    path.mkdir()
    with pytest.raises((OSError, ConfigError)) as failure:
        run()
    assert report(failure.value) == 2
    shown = "example as a run folder" if name == "lock" else f"example/{name}"
    assert re.match(f"error: cannot use .*/{shown}: Is a directory; ", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["sum", "sum.partial"])
def test_a_file_where_a_stage_belongs_is_found_when_the_stage_has_run(run, name, capsys):
    from cadenza.cli.failures import report

    (run(only=("numbers",)).run_dir / name).write_text("mine")
    with pytest.raises((OSError, ConfigError)) as failure:
        run()
    assert report(failure.value) == 2
    assert "example/sum" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{", '{"config_digest": 1, "settings": [], "seconds": "long"}'])
def test_a_spoiled_record_of_an_unfinished_stage_is_reported_as_a_defect(run, tmp_path, text):
    with pytest.raises(ServiceDied):
        run(counter={"stop_at": 4, "fault": "service"})
    with RunDatabase.open(tmp_path / "runs" / "cadenza.db") as database:
        folder = database.runs()[0].directory
    (folder / "counter.partial" / ".stage.json").write_text(text)
    with pytest.raises((CorruptArtifact, ConfigError)) as failure:
        run()
    assert "remove" in failure.value.mend or "--restart-from counter" in failure.value.mend


@pytest.mark.parametrize("key", ["config_digest", "inputs", "figures", "seconds"])
def test_a_manifest_that_lacks_what_the_runner_wrote_is_reported_as_a_defect(run, key):
    path = run().run_dir / "sum" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["about"][key]
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        CorruptArtifact, match=f"does not say its {key}; restore it, or add --restart-from sum"
    ):
        run()
    assert skipped(run(restart_from="sum")) == ["numbers", "counter", "again"]


def test_a_run_whose_identity_file_was_lost_is_stranded(run, tmp_path):
    with pytest.raises(ServiceDied):
        run(counter={"stop_at": 4, "fault": "service"})
    with RunDatabase.open(tmp_path / "runs" / "cadenza.db") as database:
        record = database.runs()[0]
    (record.directory / "run.json").unlink()
    outcome = run(resume=True)
    assert outcome.run_id == record.id
    assert outcome.stages[2].figures == {"steps": 5, "begun_at": 3}


def test_a_missing_package_is_found_after_the_stages_that_do_without(run, monkeypatch):
    monkeypatch.setattr("example_stages.Counter.packages", ("torch", "no_such_package"))
    with pytest.raises(ConfigError, match="stage 'counter' needs no_such_package, which is not installed"):
        run()
    monkeypatch.undo()
    assert skipped(run()) == []


def test_what_a_stage_put_beside_the_stages_outlives_it(run, monkeypatch):
    copy = run().run_dir / "place.txt"
    monkeypatch.setattr("example_stages.Counter.copies", (copy.name,))
    copy.write_text("5")
    with pytest.raises(ServiceDied):
        run(restart_from="counter", counter={"stop_at": 1, "fault": "service"})
    assert not copy.exists()


def test_what_a_stage_put_beside_the_stages_stays_gone_when_somebody_removes_it(run, monkeypatch):
    monkeypatch.setattr("example_stages.Sum.copies", ("sum.txt", "only of some configurations"))
    arguments = {"numbers": {"count": 4}, "again": {"inputs": {"numbers": "numbers", "twice": "numbers"}}}
    copy = run(**arguments).run_dir / "sum.txt"
    assert copy.read_text() == "12"
    copy.unlink()
    assert len(skipped(run(**arguments))) == 4
    assert copy.read_text() == "12"  # of the stage `again`, the later of two
    copy.write_text("edited")
    run(**arguments)
    assert copy.read_text() == "edited"


@pytest.mark.parametrize("flags", [{}, {"fresh": True}, {"restart_from": "counter"}])
def test_a_folder_in_the_way_of_a_copy_is_found_when_the_stage_has_run(run, monkeypatch, flags):
    outcome = run(only=("numbers", "counter"))
    monkeypatch.setattr("example_stages.Counter.copies", ("place.txt",))
    (outcome.run_dir / "place.txt").mkdir()
    with pytest.raises(
        ConfigError, match=r"example/place\.txt is a folder where a file belongs; move it away"
    ):
        run(**flags)
    assert (outcome.run_dir / "counter").is_dir() and not (outcome.run_dir / "sum").exists()
    assert list((outcome.run_dir / "place.txt").iterdir()) == []


def test_a_killed_or_deleted_run_is_shown_as_running(run, tmp_path):
    outcome = run()
    database_path = tmp_path / "runs" / "cadenza.db"

    def status():
        (told,) = list_runs(database_path.parent)
        return told["status"]

    assert status() == "finished"
    with RunDatabase.open(database_path) as database:
        database.set_run_status(outcome.run_id, "running")
    assert status() == "killed"
    with RunFolder(outcome.run_dir).lock():
        assert status() == "running"
    shutil.rmtree(outcome.run_dir)
    assert status() == "gone"


def test_an_alias_claims_to_serve_what_was_thrown_away(run, tmp_path):
    outcome, path = run(), tmp_path / "runs" / "cadenza.db"

    def served():
        return [
            [(a["alias"], a["stage"], a["version"], a["digest"], a["state"]) for a in told["aliases"]]
            for told in list_runs(path.parent)
        ]

    def point():
        with RunDatabase.open(path) as database:
            database.add_policy(f"{outcome.run_id}/counter", Policy("counter", 7, None, "d7"))
            database.point(f"{outcome.run_id}/serving", f"{outcome.run_id}/counter", 7)

    point()
    assert served() == [[("serving", "counter", 7, "d7", "there")]]
    run(restart_from="sum")
    assert served() == [[("serving", "counter", 7, "d7", "there")]]
    run(restart_from="counter")
    assert served() == [[]]
    point()
    (outcome.run_dir / "counter").rename(outcome.run_dir / "counter.partial")
    assert served() == [[("serving", "counter", 7, "d7", "unfinished")]]
    shutil.rmtree(outcome.run_dir / "counter.partial")
    assert served() == [[("serving", "counter", 7, "d7", "gone")]]
    run(fresh=True)
    assert served() == [[], [("serving", "counter", 7, "d7", "gone")]]
    assert [told["status"] for told in list_runs(path.parent)] == ["finished", "gone"]
