"""The grade of a patch: a fresh sandbox, the clean repository, the patch, then tests the agent never touched.

Order matters (invariant 11): the agent's sandbox is gone; the patch is applied to the recorded base tree, byte
for byte; visible tests come from the task directory, not from the patch; hidden tests arrive last. A verdict is a
finite score or a typed failure, never a silent 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from cadenza.core.errors import DeadlineExceeded, RolloutFailure
from cadenza.core.types import Task, Verdict
from cadenza.sandbox import PytestResult, Sandbox, SandboxGone, SandboxSpec
from cadenza.sandbox.errors import PathRefused
from cadenza.tasks.directory import read_tree
from cadenza.tasks.patch import PatchRefused, apply_patch

# Files that steer pytest or the interpreter: a patch that touches one is refused (SWE-bench 601, 620: a conftest hook
# turned failures into passes in every report).
STEERING = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "setup.cfg",
    "tox.ini",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    "pytest.py",
    "_pytest",
    "pluggy",
    "pluggy.py",
)
TEST_TIMEOUT_S = 5.0


def is_test_path(path: str) -> bool:
    """Whether a path is a test, by its components: ``contest/latest.py`` is not (SWE-bench collect)."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    in_tests = any(p in ("test", "tests") for p in parts[:-1])
    return in_tests or name.startswith("test_") or name.endswith("_test.py")


def steering_paths(paths: Iterable[str]) -> list[str]:
    """Those of the paths with a component that steers the test run."""
    return [
        p
        for p in paths
        if any(fnmatchcase(part.lower(), pattern) for part in PurePosixPath(p).parts for pattern in STEERING)
    ]


def graded_changes(base: dict[str, bytes], patch: str) -> dict[str, bytes | None]:
    """What the patch changes outside tests: path -> new content, None for deleted. Changes to tests are dropped.

    Raises:
        PatchRefused: the patch does not apply byte for byte, or touches a file that steers the test run.
    """
    patched = apply_patch(base, patch)
    changes: dict[str, bytes | None] = {p: d for p, d in patched.items() if base.get(p) != d}
    changes |= {p: None for p in base if p not in patched}
    if steering := steering_paths(changes):
        raise PatchRefused(f"the patch touches {', '.join(sorted(steering))}, which steers the test run")
    return {p: d for p, d in changes.items() if not is_test_path(p)}


async def grade(backend: Any, task: Task, patch: str, deadline_s: float) -> Verdict:
    """Grades a patch: 1.0 exactly when every expected test passed, else 0.0.

    Args:
        backend: a sandbox backend with ``create`` (``LocalBackend``).
        task: a generated task; ``metadata["expected_tests"]`` holds the node ids of visible and hidden tests.
        patch: the agent's diff against the task's repository.
        deadline_s: for the whole grading, sandbox creation included.

    Returns a verdict with a failure instead of a score where the patch is refused (``patch_refused``, the model's own),
    the tests did not end (``grader_timeout``, the model's own), or the sandbox or the grader broke (to be retried).
    """
    root = task.directory / "environment" / "repo"
    base = read_tree(root)
    try:
        changes = graded_changes(base, patch)
    except PatchRefused as e:
        return Verdict(None, RolloutFailure("patch_refused", str(e), retry=False, counts=True))
    try:
        async with asyncio.timeout(deadline_s):
            sandbox = await backend.create(
                SandboxSpec(layers=(root,), labels={"task": task.id, "for": "grade"})
            )
            try:
                result = await _run_tests(sandbox, task, changes)
            finally:
                await sandbox.destroy()
    except SandboxGone as e:
        return Verdict(None, RolloutFailure("sandbox_gone", str(e), retry=True, counts=False))
    except (TimeoutError, DeadlineExceeded) as e:
        detail = str(e) or f"grading took longer than {deadline_s:g} s"
        return Verdict(None, RolloutFailure("grader_timeout", detail, retry=True, counts=False))
    except (PathRefused, IsADirectoryError, NotADirectoryError, FileExistsError) as e:
        # The patch makes a file where another, or a test, needs a folder, or the other way round.
        return Verdict(None, RolloutFailure("patch_refused", str(e), retry=False, counts=True))
    except OSError as e:
        return Verdict(
            None, RolloutFailure("grader_crashed", f"{type(e).__name__}: {e}", retry=True, counts=False)
        )
    return verdict_of(task.metadata["expected_tests"], result)


async def _run_tests(sandbox: Sandbox, task: Task, changes: dict[str, bytes | None]) -> PytestResult:
    for path, data in sorted(changes.items()):
        await (sandbox.remove(path) if data is None else sandbox.write(path, data))
    for path, data in hidden_tests(task).items():
        await sandbox.write(path, data)
    return await sandbox.pytest(files_of_tests(task), timeout_s=TEST_TIMEOUT_S)


def hidden_tests(task: Task) -> dict[str, bytes]:
    """Hidden test files by the path they get in the repository's root."""
    return {p.name: p.read_bytes() for p in sorted((task.directory / "tests").glob("test_hidden_*.py"))}


def files_of_tests(task: Task) -> list[str]:
    """The files of the expected tests, in order; only these are collected."""
    return list(dict.fromkeys(id.split("::")[0] for id in task.metadata["expected_tests"]))


def verdict_of(expected: list[str], result: PytestResult) -> Verdict:
    """Score of a finished run. A missing expected test has failed (SWE-smith 24); no expected tests is no grade.

    Code that ends the process, or breaks pytest from inside (``SystemExit`` at import gives its internal error), has
    its tests missing and scores 0: the tests are trusted and validated, so the patch did it. A run that was cut off
    by time is a failure and not a score.
    """
    if not expected:
        return Verdict(
            None, RolloutFailure("grader_crashed", "the task expects no tests", retry=False, counts=False)
        )
    tests = {id: result.tests.get(id, "missing") for id in expected}
    if result.timed_out:
        detail = f"the tests ran longer than {TEST_TIMEOUT_S:g} s"
        return Verdict(None, RolloutFailure("grader_timeout", detail, retry=False, counts=True), tests)
    passed = all(outcome == "passed" for outcome in tests.values())
    clean = (
        result.exit_code == 0
    )  # every collected test is expected, so passing means 0: anything else ended early
    return Verdict(1.0 if passed and clean else 0.0, None, tests, result.output[-2000:])
