"""Validation of written tasks in real sandboxes: the gold patch passes everything, no patch does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.core.types import Task
from cadenza.sandbox import SandboxSpec
from cadenza.tasks.directory import read_tree
from cadenza.tasks.grade import files_of_tests, graded_changes, hidden_tests, verdict_of

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Invalid:
    """A task that must not be used, and why."""

    task_id: str
    reason: str


async def validate_tasks(tasks: Sequence[Task], backend: Any, concurrency: int = 4) -> list[Invalid]:
    """Runs every task without and with its gold patch; returns those that fail.

    Valid: unrepaired, at least one hidden test fails and one visible, or no visible one where reports tell of the bugs;
    with the gold patch every expected test passes and nothing but expected tests was collected. Both runs share one
    sandbox, the unrepaired one comes first.

    Raises:
        SandboxGone, SandboxUnavailable: the backend failed; nothing is known about the remaining tasks.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> Invalid | None:
        async with gate:
            reason = await _fault(task, backend)
        return Invalid(task.id, reason) if reason else None

    found = await asyncio.gather(*(one(task) for task in tasks))
    return [f for f in found if f]


async def _fault(task: Task, backend: Any) -> str | None:
    root = task.directory / "environment" / "repo"
    expected = task.metadata["expected_tests"]
    changes = graded_changes(read_tree(root), (task.directory / "solution" / "patch.diff").read_text())
    sandbox = await backend.create(SandboxSpec(layers=(root,), labels={"task": task.id, "for": "validate"}))
    try:
        for path, data in hidden_tests(task).items():
            await sandbox.write(path, data)
        before = await sandbox.pytest(files_of_tests(task), timeout_s=_TIMEOUT_S)
        if before.timed_out:
            return "the unrepaired repository does not end"
        failed = [id for id in expected if before.tests.get(id) != "passed"]
        hidden = [id for id in failed if id.startswith("test_hidden_")]
        if task.metadata.get("reports"):
            if len(hidden) != len(failed):
                return "a visible test fails, which only its reports should tell"
            if not hidden:
                return "the unrepaired repository passes its hidden tests"
        elif not hidden or len(hidden) == len(failed):
            return "the unrepaired repository passes its visible or its hidden tests"
        for path, data in changes.items():
            await (sandbox.remove(path) if data is None else sandbox.write(path, data))
        after = await sandbox.pytest(files_of_tests(task), timeout_s=_TIMEOUT_S)
    finally:
        await sandbox.destroy()
    verdict = verdict_of(expected, after)
    if verdict.score != 1.0:
        return f"the gold patch does not pass: {verdict.failure or verdict.tests}"
    if set(after.tests) != set(expected):
        return f"tests that are not expected: {sorted(set(after.tests) - set(expected))}"
    return None
