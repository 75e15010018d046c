"""The run database: nothing trained twice, nothing lost between processes, grouped commits, typed failures."""

import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cadenza.core.errors import ConfigError, CorruptArtifact, MissingArtifact
from cadenza.core.grouped_writes import GroupedWriter
from cadenza.core.rundb import LedgerViolation, RunDatabase, rl_run_id
from cadenza.core.types import Policy


@pytest.fixture
def database(tmp_path):
    with RunDatabase.open(tmp_path / "cadenza.db") as opened:
        opened.begin_run("r", "demo", tmp_path, {"name": "demo"}, 0, {"cores": 2})
        yield opened


def test_stage_lifecycle_is_what_was_written(database):
    database.start_stage("r", "sft", 1, "c" * 64, {"steps": 3})
    database.start_stage("r", "tasks", 0, "d" * 64, {})
    database.finish_stage("r", "tasks", "a" * 64, {"count": 5})
    database.stop_stage("r", "sft", "failed", "no space left")
    tasks, sft = database.stages("r")
    assert (tasks.name, tasks.status, tasks.artifact_digest, tasks.figures) == (
        "tasks",
        "finished",
        "a" * 64,
        {"count": 5},
    )
    assert (sft.status, sft.reason, sft.config) == ("failed", "no space left", {"steps": 3})


def test_a_prompt_planned_twice_is_refused_and_the_rest_of_its_step_with_it(database):
    database.plan("r/rl", 1, [("a", "g1")])
    with pytest.raises(LedgerViolation, match="plans a prompt twice"):
        database.plan("r/rl", 2, [("b", "g2"), ("a", "g3")])
    assert [entry.task_id for entry in database.ledger("r/rl")] == ["a"]


def test_the_same_prompt_is_free_in_another_rl_run(database):
    database.plan("r/rl", 1, [("a", "g")])
    database.plan("r/rl2", 1, [("a", "g")])


def test_a_prompt_trained_twice_is_refused_and_the_step_is_not_recorded(database):
    database.plan("r/rl", 1, [("a", "g")])
    database.record_step("r/rl", 1, 1, {"loss": 0.5}, trained=["a"])
    for tasks in (["a"], ["never planned"]):
        with pytest.raises(LedgerViolation, match="not waiting to be trained"):
            database.record_step("r/rl", 2, 2, {}, trained=tasks)
    assert [step.step for step in database.steps("r/rl")] == [1]


def test_resume_restores_metrics_and_frees_what_the_lost_steps_had_planned(database):
    for step in (1, 2, 3):
        database.plan("r/rl", step, [(f"t{step}", "g"), (f"u{step}", "g")])
    database.record_step("r/rl", 1, 1, {"reward": 0.1}, trained=["t1"], dropped=["u1"])
    database.record_step("r/rl", 2, 2, {"reward": 0.2}, trained=["t2", "u2"])
    for version in (0, 1, 2, 3):
        database.add_policy(
            "r/rl", Policy("demo", version, version - 1 if version else None, f"{version}" * 64)
        )
    database.rewind("r/rl", 1)
    assert [p.version for p in database.policies("r/rl")] == [0, 1]
    assert [(s.step, s.metrics) for s in database.steps("r/rl")] == [(1, {"reward": 0.1})]
    assert [(e.task_id, e.status) for e in database.ledger("r/rl")] == [("t1", "trained"), ("u1", "dropped")]
    database.plan("r/rl", 2, [("t2", "g")])  # free again


def test_forgetting_a_stage_frees_its_ledger_and_no_other(database):
    database.start_stage("r", "rl", 0, "c", {})
    for stage in ("rl", "rl2"):
        database.plan(rl_run_id("r", stage), 1, [("a", "g")])
    database.forget_stage("r", "rl")
    assert database.ledger("r/rl") == []
    assert len(database.ledger("r/rl2")) == 1
    assert database.stages("r") == []


def test_an_alias_never_points_at_an_unknown_policy(database):
    with pytest.raises(MissingArtifact, match="no policy version 3"):
        database.point("r/serving", "r/rl", 3)
    database.add_policy("r/rl", Policy("demo", 3, 2, "d" * 64))
    database.point("r/serving", "r/rl", 3)
    (alias,) = database.aliases("r")
    assert (alias.alias, alias.stage, alias.version, alias.digest) == ("serving", "rl", 3, "d" * 64)
    assert database.aliases("_") == [], "an underscore stands for any letter"
    database.unpoint("r/serving")
    assert database.aliases("r") == []


def test_an_alias_outlives_the_policy_it_points_at(database):
    for stage, versions in (("rl", 3), ("realtime", 2)):
        for version in range(versions):
            database.add_policy(f"r/{stage}", Policy(stage, version, None, f"{stage}{version}"))
    database.point("r/candidate", "r/rl", 2)
    database.point("r/canary", "r/realtime", 1)
    database.point("r/serving", "r/realtime", 0)
    database.rewind("r/realtime", -1)  # as an attempt does that begins again
    assert [a.digest for a in database.aliases("r")] == ["rl2", "realtime0"]
    database.forget_stage("r", "realtime")
    assert [(a.alias, a.stage) for a in database.aliases("r")] == [("candidate", "rl")]


def test_events_come_back_in_order(database):
    for number in range(5):
        database.event("r", "retry", {"n": number})
    database.flush()
    assert [event["data"]["n"] for event in database.events("r", "retry")] == list(range(5))


def test_many_threads_share_few_commits_and_lose_nothing(database):
    before = database._writer.commits
    begun = time.monotonic()

    def work(number):
        for step in range(50):
            database.event(f"w{number}", "x", {"step": step})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    database.flush()
    seconds = time.monotonic() - begun
    assert all(len(database.events(f"w{n}")) == 50 for n in range(4))
    assert database._writer.commits - before <= seconds / 0.05 + 2


def test_one_failing_write_of_a_group_leaves_the_others_committed(database):
    futures = [database.plan("r/rl", 1, [(task, "g")], wait=False) for task in ("a", "b", "a", "c")]
    failures = [future.exception(timeout=30) for future in futures if future is not None]
    assert [type(f).__name__ for f in failures] == ["NoneType", "NoneType", "LedgerViolation", "NoneType"]
    assert [entry.task_id for entry in database.ledger("r/rl")] == ["a", "b", "c"]


def _write_from_process(path, number, count):
    with RunDatabase.open(path) as database:
        for step in range(count):
            database.plan(f"p{number}/rl", step, [(f"t{step}", "g")])


def test_processes_that_open_a_new_database_at_once_all_write(tmp_path):
    context = multiprocessing.get_context("spawn")
    path = tmp_path / "cadenza.db"
    workers = [context.Process(target=_write_from_process, args=(path, n, 20)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(180)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    with RunDatabase.open(path) as database:
        assert [len(database.ledger(f"p{n}/rl")) for n in range(3)] == [20, 20, 20]


def test_a_writer_that_is_closed_refuses_and_commits_what_it_had(tmp_path):
    database = RunDatabase.open(tmp_path / "a.db")
    database.event("r", "x", {})
    database.close()
    database.close()
    with pytest.raises(RuntimeError, match="closed"):
        database.event("r", "x", {})
    with RunDatabase.open(tmp_path / "a.db") as again:
        assert len(again.events("r")) == 1


def test_a_file_that_is_no_database_is_refused_in_one_line(tmp_path):
    path = tmp_path / "cadenza.db"
    path.write_bytes(b"this is not SQLite " * 100)
    with pytest.raises(CorruptArtifact, match="not a readable run database"):
        RunDatabase.open(path)


def test_a_database_that_cannot_be_opened_names_the_folder(tmp_path):
    (tmp_path / "cadenza.db").mkdir()
    with pytest.raises(ConfigError, match="cannot open the run database"):
        RunDatabase.open(tmp_path / "cadenza.db")


def test_an_observer_changes_what_it_reads(tmp_path):
    path = tmp_path / "100% of #1.db"  # what a URI would read as something else
    with RunDatabase.open(path) as database, RunDatabase.observe(path) as observer:
        database.event("r", "x", {"n": 1}, wait=True)
        assert [event["data"] for event in observer.events("r")] == [{"n": 1}]
        with pytest.raises(ConfigError, match="cannot open the run database .*readonly"):
            observer.event("r", "y", {}, wait=True)
        assert len(database.events("r")) == 1


@pytest.mark.needs_root
@pytest.mark.parametrize("name", ["what?mode=ro", "50%20off#1", "two words"])
def test_a_folder_with_a_strange_name_gets_another_database(tmp_path, name):
    path = tmp_path / name / "cadenza.db"
    with RunDatabase.open(path) as opened:
        opened.begin_run("r", "demo", tmp_path, {"name": "demo"}, 0, {"cores": 2})
    assert path.is_file() and list(tmp_path.iterdir()) == [path.parent]
    with RunDatabase.observe(path) as seen:
        assert [run.id for run in seen.runs()] == ["r"]


def test_runs_in_a_folder_that_cannot_be_written_are_hidden(tmp_path):
    def read_only(flag):
        subprocess.run(["mount", "-o", f"remount,{flag}", str(tmp_path)], check=True)

    def kinds(location):
        with RunDatabase.observe(location) as database:
            return [event["kind"] for event in database.events("r")]

    path = tmp_path / "cadenza.db"
    killed = (
        "import os, sys; from cadenza.core.rundb import RunDatabase; "
        "RunDatabase.open(sys.argv[1]).event('r', 'unmerged', {}, wait=True); os.kill(os.getpid(), 9)"
    )
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    try:
        with RunDatabase.open(path) as database:
            database.event("r", "merged", {}, wait=True)
        read_only("ro")
        assert kinds(path) == kinds(f"sqlite:///{path}") == ["merged"]
        read_only("rw")
        subprocess.run([sys.executable, "-c", killed, str(path)], check=False)
        read_only("ro")
        assert kinds(path) == ["merged", "unmerged"]
        read_only("rw")
        path.with_name("cadenza.db-shm").unlink()
        read_only("ro")
        with pytest.raises(
            ConfigError, match="newest writes of .*cadenza.db lie in cadenza.db-wal, .*; copy"
        ):
            kinds(path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_writing_thread_starts_only_for_a_write(tmp_path):
    with RunDatabase.open(tmp_path / "a.db") as database:
        assert database.runs() == []
        writer: GroupedWriter = database._writer
        assert writer._thread is None


class Ledger(RuleBasedStateMachine):
    """Any order of planning, training, crashing and rewinding trains a prompt at most once."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.database = RunDatabase.open(Path(self.folder.name) / "a.db", commit_interval_s=0.0)
        self.step = 0
        self.waiting: dict[str, int] = {}
        self.trained: dict[str, int] = {}

    @rule(tasks=st.sets(st.sampled_from("abcdefgh"), min_size=1, max_size=3))
    def plan(self, tasks):
        clash = any(task in self.waiting or task in self.trained for task in tasks)
        try:
            self.database.plan("rl", self.step + 1, [(task, "g") for task in sorted(tasks)])
            assert not clash
            self.waiting.update(dict.fromkeys(tasks, self.step + 1))
        except LedgerViolation:
            assert clash

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def train(self, data):
        tasks = data.draw(st.sets(st.sampled_from(sorted(self.waiting)), min_size=1))
        self.step += 1
        self.database.record_step("rl", self.step, self.step, {"n": len(tasks)}, trained=sorted(tasks))
        for task in tasks:
            del self.waiting[task]
            self.trained[task] = self.step

    @precondition(lambda self: self.step > 0)
    @rule(data=st.data())
    def crash_and_rewind(self, data):
        kept = data.draw(st.integers(0, self.step))
        planned = {entry.task_id: entry.planned_step for entry in self.database.ledger("rl")}
        self.database.rewind("rl", kept)
        back = {task: planned[task] for task, step in self.trained.items() if step > kept}
        self.trained = {task: step for task, step in self.trained.items() if step <= kept}
        self.waiting = {t: s for t, s in {**self.waiting, **back}.items() if s <= kept}
        self.step = kept

    @invariant()
    def the_database_agrees(self):
        entries = self.database.ledger("rl")
        assert {e.task_id: e.trained_step for e in entries if e.status == "trained"} == self.trained
        assert {e.task_id: e.planned_step for e in entries if e.status == "planned"} == self.waiting
        assert [s.step for s in self.database.steps("rl")] == list(range(1, self.step + 1))

    def teardown(self):
        self.database.close()
        self.folder.cleanup()


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
