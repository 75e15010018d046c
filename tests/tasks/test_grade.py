"""Grading: from the patch alone, with trusted tests; a finite score or a typed failure."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.core.types import Task, Verdict
from cadenza.sandbox import LocalBackend, PytestResult, SandboxGone
from cadenza.tasks.directory import read_tree
from cadenza.tasks.generate import GeneratorConfig, generate_split
from cadenza.tasks.grade import grade, is_test_path, steering_paths, verdict_of
from cadenza.tasks.patch import make_patch
from cadenza.tasks.validate import validate_tasks

COUNT = 6


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> list[Task]:
    defaults = GeneratorConfig().splits
    out = []
    for split in ("train", "heldout_hard"):
        config = GeneratorConfig(seed=5, splits={split: defaults[split].model_copy(update={"count": COUNT})})
        out += generate_split(config, split, tmp_path_factory.mktemp("tasks") / split)
    return out


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> list[Task]:
    """Tasks whose bugs only a list of reports tells of."""
    train = GeneratorConfig().splits["train"].model_copy(update={"count": 3, "reports_share": 1.0})
    config = GeneratorConfig(seed=5, splits={"train": train})
    return generate_split(config, "train", tmp_path_factory.mktemp("reported") / "train")


def base_of(task: Task) -> dict[str, bytes]:
    return read_tree(task.directory / "environment" / "repo")


def gold(task: Task) -> str:
    return (task.directory / "solution" / "patch.diff").read_text()


def graded(task: Task, *patches: str) -> list[Verdict]:
    async def run() -> list[Verdict]:
        async with LocalBackend() as backend:
            return [await grade(backend, task, patch, 30.0) for patch in patches]

    return asyncio.run(run())


@pytest.mark.needs_namespaces
def test_tasks_whose_gold_fails_or_whose_bug_no_test_sees(tasks):
    async def run():
        async with LocalBackend() as backend:
            return await validate_tasks(tasks, backend)

    assert asyncio.run(run()) == []


@pytest.mark.needs_namespaces
def test_a_task_whose_visible_tests_give_away_what_its_reports_tell(reported, tasks):
    secret = dataclasses.replace(tasks[0], metadata={**tasks[0].metadata, "reports": True})

    async def run():
        async with LocalBackend() as backend:
            return await validate_tasks([*reported, secret], backend)

    (invalid,) = asyncio.run(run())
    assert invalid.task_id == secret.id and "a visible test fails" in invalid.reason


@pytest.mark.needs_namespaces
def test_a_half_repair_and_no_repair_score_zero(tasks):
    task = tasks[-1]
    halves = gold(task).split("diff --git ")[1:]
    assert len(halves) == 2
    scores = [v.score for v in graded(task, gold(task), "", *("diff --git " + h for h in halves))]
    assert scores == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.needs_namespaces
def test_an_agent_that_edits_the_failing_test(tasks):
    base = base_of(tasks[0])
    tests = {p: b"def test_nothing():\n    pass\n" for p in base if p.startswith("test_")}
    hidden = {"test_hidden_" + p.removeprefix("test_"): b"" for p in tests}
    easy = make_patch(base, {**tests, **hidden})
    fixed = make_patch(base, {**tests, **{p: None for p in base if p == "nothing"}}) + gold(tasks[0])
    verdicts = graded(tasks[0], easy, fixed)
    assert [v.score for v in verdicts] == [0.0, 1.0]  # tests restored, the source edit kept


@pytest.mark.needs_namespaces
def test_a_syntax_error_in_an_imported_module(tasks):
    task = tasks[0]
    buggy = task.metadata["buggy_files"][0]
    (verdict,) = graded(task, make_patch(base_of(task), {buggy: b"def broken(:\n"}))
    assert verdict.score == 0.0 and "missing" in verdict.tests.values()


@pytest.mark.needs_namespaces
@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)\n",
        "raise SystemExit(0)\n",
        "import sys\nsys.exit(0)\n",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    ],
)
def test_a_module_that_ends_the_run_early(tasks, source):
    task = tasks[0]
    (verdict,) = graded(task, make_patch(base_of(task), {task.metadata["buggy_files"][0]: source.encode()}))
    assert verdict.score == 0.0


FORGED = """
import os
for fd in range(3, 99):
    try:
        if "report" in os.readlink(f"/proc/self/fd/{fd}"):
            os.write(fd, LINE + b"\\n")
    except OSError:
        pass
os._exit(0)
"""


@pytest.mark.needs_namespaces
@pytest.mark.parametrize(
    "line",
    [
        "b'3'",
        "b'[1]'",
        'b\'{"test": {}, "outcome": []}\'',
        'b\'{"test": "a", "outcome": "failed", "failure": {"zzz": 1}}\'',
        "b'{\"exit\": 4}'",
        'b\'{"exit": "0"}\'',
        "b'[' * 200_000",
    ],
)
def test_a_module_that_writes_into_the_report_gets_its_bad_grade_thrown_away(tasks, line):
    """It would be run again as if the grader had broken, or end the whole service."""
    task = tasks[0]
    source = FORGED.replace("LINE", line).encode()
    (verdict,) = graded(task, make_patch(base_of(task), {task.metadata["buggy_files"][0]: source}))
    assert verdict.score == 0.0


@pytest.mark.needs_namespaces
def test_a_patch_that_is_in_the_way_of_the_tests_is_run_again_as_if_the_grader_had_broken(tasks):
    task = tasks[0]
    (hidden,) = {t.split("::")[0] for t in task.metadata["expected_tests"] if "hidden" in t}
    inside: dict[str, bytes | None] = {task.metadata["buggy_files"][0] + "/x": b"x\n"}
    below: dict[str, bytes | None] = {hidden + "/x.txt": b"1\n"}
    for changes in (below, inside):
        (verdict,) = graded(task, make_patch({}, changes))
        assert verdict.failure is not None and verdict.failure.kind == "patch_refused"
        assert verdict.failure.counts and not verdict.failure.retry


@pytest.mark.needs_namespaces
def test_a_module_that_never_ends_is_a_failure_of_the_model(tasks):
    task = tasks[0]
    patch = make_patch(base_of(task), {task.metadata["buggy_files"][0]: b"while True:\n    pass\n"})
    (verdict,) = graded(task, patch)
    assert verdict.score is None and verdict.failure is not None
    assert verdict.failure.kind == "grader_timeout" and verdict.failure.counts and not verdict.failure.retry


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "sub/conftest.py",
        "pytest.ini",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "sitecustomize.py",
        "usercustomize.py",
        "x.pth",
        "CONFTEST.py",
        "pytest.py",
        "_pytest/runner.py",
    ],
)
def test_a_patch_that_steers_the_test_run(tasks, path):
    class NoBackend:
        async def create(self, spec):
            raise AssertionError("a refused patch needs no sandbox")

    patch = make_patch(base_of(tasks[0]), {path: b"x = 1\n"}) + gold(tasks[0])
    verdict = asyncio.run(grade(NoBackend(), tasks[0], patch, 5.0))
    assert verdict.score is None and verdict.failure is not None
    assert (
        verdict.failure.kind == "patch_refused" and verdict.failure.counts and path in verdict.failure.detail
    )


def test_a_patch_that_does_not_apply_is_typed(tasks):
    verdict = asyncio.run(grade(None, tasks[0], "diff --git a/x b/x\nnonsense\n", 5.0))
    assert verdict.failure is not None and verdict.failure.kind == "patch_refused"


@pytest.mark.parametrize(
    "error, kind",
    [
        (SandboxGone("killed"), "sandbox_gone"),
        (OSError(28, "No space left"), "grader_crashed"),
        (TimeoutError(), "grader_timeout"),
    ],
)
def test_broken_infrastructure_is_retried_and_never_zero(tasks, error, kind):
    class Broken:
        async def create(self, spec):
            raise error

    verdict = asyncio.run(grade(Broken(), tasks[0], gold(tasks[0]), 5.0))
    assert verdict.score is None and verdict.failure is not None
    assert (verdict.failure.kind, verdict.failure.retry, verdict.failure.counts) == (kind, True, False)


def test_a_sandbox_that_never_comes_is_given_up_at_the_deadline(tasks):
    class Stuck:
        async def create(self, spec):
            await asyncio.Event().wait()

    verdict = asyncio.run(grade(Stuck(), tasks[0], gold(tasks[0]), 0.05))
    assert verdict.failure is not None and verdict.failure.kind == "grader_timeout" and verdict.failure.retry


def result(tests: dict[str, str], exit_code: int = 0, timed_out: bool = False) -> PytestResult:
    return PytestResult(exit_code, tests, [], "", timed_out, 0.0)


def test_scores_of_finished_runs():
    assert verdict_of(["t::a"], result({"t::a": "passed"})).score == 1.0
    assert verdict_of(["t::a", "t::b"], result({"t::a": "passed"})).score == 0.0  # missing is failed
    assert verdict_of(["t::a"], result({"t::a": "skipped"})).score == 0.0
    assert verdict_of(["t::a [x y]"], result({"t::a [x y]": "passed"})).score == 1.0  # ids as they are
    assert verdict_of(["t::a"], result({"t::a": "passed"}, exit_code=70)).score == 0.0
    assert verdict_of(["t::a"], result({}, exit_code=5)).score == 0.0  # executed 0 of 0
    assert verdict_of([], result({})).failure is not None
    assert verdict_of(["t::a"], result({}, exit_code=3)).score == 0.0
    assert verdict_of(["t::a"], result({}, exit_code=4)).score == 0.0  # the code under test can forge it


def test_test_files_are_told_by_path_components():
    assert is_test_path("test_a.py") and is_test_path("tests/x.py") and is_test_path("a/b_test.py")
    assert not is_test_path("contest/latest.py") and not is_test_path("attest.py")
    assert steering_paths(["a/conftest.py", "myconftest.py", "b.py"]) == ["a/conftest.py"]


@pytest.mark.parametrize("repaired", [True, False])
def test_the_harbor_script_agrees_with_the_grader(tasks, tmp_path: Path, repaired):
    """The same verdict from tests/test.sh, run on the host with the paths of Harbor's containers replaced."""
    task = tasks[0]
    app, logs = tmp_path / "app", tmp_path / "logs"
    app.mkdir()
    logs.mkdir()
    for path, data in base_of(task).items():
        (app / path).write_bytes(data)
    if repaired:
        subprocess.run(
            ["git", "apply", str(task.directory / "solution" / "patch.diff")], cwd=app, check=True, timeout=20
        )
    script = (task.directory / "tests" / "test.sh").read_text()
    script = script.replace("/logs/verifier", str(logs)).replace("/tests/", f"{task.directory}/tests/")
    script = script.replace("python -B", f"{sys.executable} -B")
    env = {**os.environ, "APP_DIR": str(app), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(["sh", "-c", script], env=env, check=True, timeout=60, capture_output=True)
    assert (logs / "reward.txt").read_text().strip() == ("1" if repaired else "0")
