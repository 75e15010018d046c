"""A process that is killed, stopped, or out of disk leaves a run that the same command finishes."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.core.deadlines import wait_until
from cadenza.core.rundb import RunDatabase

TRAINED = [f"task{n}" for n in range(1, 6)]


def trained(runs: Path) -> list[str]:
    with RunDatabase.open(runs / "cadenza.db") as database:
        return [e.task_id for e in database.ledger(f"{database.runs()[0].id}/counter", "trained")]


def test_kill_9_in_the_middle_loses_no_finished_step_and_trains_none_twice(train, run, tmp_path):
    killed = train("--set", "counter.stop_at=4")
    assert killed.returncode == -signal.SIGKILL
    assert int((tmp_path / "runs/example/lock").read_text()) != os.getpid()  # and yet free
    stages = {stage.name: stage for stage in run().stages}
    assert stages["numbers"].skipped and stages["sum"].skipped
    assert stages["counter"].figures == {"steps": 5, "begun_at": 3}
    assert trained(tmp_path / "runs") == TRAINED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_in_one_line_and_goes_on(run, train, tmp_path, command_environment, number):
    here = tmp_path / "here"
    sets = ("counter.stop_at=3", "counter.fault=wait", f"counter.wait_for={here}")
    command = [sys.executable, "-m", "cadenza", "train", "./example.toml"]
    process = subprocess.Popen(
        [*command, *(word for text in sets for word in ("--set", text))],
        cwd=tmp_path, env=command_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell that started the tests in its background had SIGINT ignored, and so would the child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        wait_until(lambda: here.exists() or process.poll() is not None, 180, "the stage to begin")
        process.send_signal(number)
        _, errors = process.communicate(timeout=180)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert (
        errors.splitlines()[-1]
        == "error: interrupted in stage 'counter'; run the same command again to go on"
    )
    assert "Traceback" not in errors
    assert run().stages[2].figures["begun_at"] == 2


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(train, run, tmp_path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))

    full = train("--set", "counter.stop_at=4", "--set", "counter.fault=disk", preexec_fn=small_files)
    assert full.returncode == 6
    last = full.stderr.splitlines()[-1]
    assert last.startswith("error: no space left to write ") and "free disk space" in last
    assert "Traceback" not in full.stderr
    assert run().stages[2].figures["begun_at"] == 3
    assert trained(tmp_path / "runs") == TRAINED


@pytest.mark.needs_root
def test_a_file_system_that_fills_up_under_everything_is_one_line(train, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(small)], check=True)
    try:
        arguments = (
            "--run-dir",
            str(small / "example"),
            "--set",
            "counter.stop_at=4",
            "--set",
            "counter.fault=disk",
        )
        full = train(*arguments)
        assert full.returncode == 6, full.stderr
        assert full.stderr.splitlines()[-1].startswith("error: no space ")
        assert "Traceback" not in full.stderr
        subprocess.run(["mount", "-o", "remount,size=20m", str(small)], check=True)
        again = train("--run-dir", str(small / "example"), "--json")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["stages"][0]["skipped"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_defect_leaves_its_trace_in_the_run_and_one_line_on_the_terminal(train, tmp_path):
    done = train("--set", "counter.stop_at=2", "--set", "counter.fault=defect")
    assert done.returncode == 70
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "error: unexpected ZeroDivisionError: a defect of two lines; please report it with the trace in "
    )
    path = Path(last.rsplit(" ", 1)[1])
    assert path.parent == tmp_path / "runs" / "example" or path.parent == Path("runs/example")
    assert "ZeroDivisionError" in (tmp_path / path).read_text()
    assert "Traceback" not in done.stderr


def test_a_dead_service_is_one_line_with_its_own_exit_code(train):
    done = train("--set", "counter.stop_at=2", "--set", "counter.fault=service")
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1] == "error: the engine ended; run the same command again to go on"
