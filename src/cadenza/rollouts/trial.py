"""One trial: lease, agent, patch, grade in a fresh sandbox, rewards, Rollout.

Training, evaluation and demonstrations all call this. Nothing is retried here; a failure becomes a typed verdict and
the caller decides. A verdict is a finite number or a failure, never a silent 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cadenza.core.config import StrictConfig
from cadenza.core.errors import DeadlineExceeded, RolloutFailure
from cadenza.core.types import Rollout, Task, Verdict
from cadenza.harness import Agent, AgentResult
from cadenza.harness.tools.list_dir import is_litter
from cadenza.rewards import RewardConfig, reward
from cadenza.sandbox.errors import PathRefused, SandboxGone
from cadenza.sandbox.spec import Limits, SandboxSpec
from cadenza.tasks.grade import grade
from cadenza.tasks.patch import PatchRefused, make_patch
from cadenza.tokens import Sampling, SessionLost, TokenSession


class Deadlines(StrictConfig):
    """Seconds each part of a trial may wait; the agent's own limit is ``Limits.wall_s`` of the harness.

    ``lease_s``: for a sandbox. ``patch_s``: for the changes of the agent's sandbox. ``grade_s``: for the tests.
    """

    lease_s: float = 30.0
    patch_s: float = 10.0
    grade_s: float = 30.0


class _Failed(Exception):
    def __init__(self, kind: str, detail: str, *, retry: bool, counts: bool) -> None:
        super().__init__(detail)
        self.failure = RolloutFailure(kind, detail[:300], retry=retry, counts=counts)


async def run_trial(
    task: Task,
    session: TokenSession,
    backend: Any,
    agent: Agent,
    sampling: Sampling,
    seed: int,
    group_id: str,
    deadlines: Deadlines | None = None,
    *,
    rewards: RewardConfig | None = None,
    sandbox_limits: Limits | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Rollout:
    """Runs one trial to its end and closes ``session``.

    Failures of the world come back as a verdict with ``retry`` (``sandbox_gone``, ``engine_lost``,
    ``grader_timeout``, ``grader_crashed``); a patch that cannot be made counts as the model's own
    (``patch_refused``). Raises SandboxUnavailable, ServiceDied
    (the backend is gone), FileNotFoundError (the task is) and CancelledError.
    """
    deadlines = deadlines or Deadlines()
    timings: dict[str, float] = {}
    result: AgentResult | None = None
    patch = ""
    try:
        result, patch = await _work(
            task,
            session,
            backend,
            agent,
            sampling,
            deadlines,
            timings,
            sandbox_limits,
            on_step,
        )
        verdict = await _grade(task, backend, patch, deadlines, timings)
    except _Failed as failed:
        verdict = Verdict(score=None, failure=failed.failure)
    finally:
        session.close()
    if result is None:
        result = AgentResult([], [], "error", {}, {})
    timings |= result.timings
    named, total = reward(
        verdict, result.segments, result.trace, result.finish_reason, rewards or RewardConfig()
    )
    return Rollout(
        id=f"{group_id}.{seed}",
        group_id=group_id,
        task_id=task.id,
        segments=result.segments,
        trace=result.trace,
        patch=patch,
        verdict=verdict,
        rewards=named,
        reward=total,
        status="finished" if total is not None else "failed",
        timings=timings,
        seed=seed,
    )


def prompt_of(task: Task) -> str:
    """The user's message of a task: its instruction without surrounding blank lines."""
    return (task.directory / "instruction.md").read_text(encoding="utf-8").strip()


def repository_of(task: Task) -> Path:
    """The repository the agent works on."""
    return task.directory / "environment" / "repo"


async def _work(
    task: Task,
    session: TokenSession,
    backend: Any,
    agent: Agent,
    sampling: Sampling,
    deadlines: Deadlines,
    timings: dict[str, float],
    limits: Limits | None,
    on_step: Callable[[dict[str, Any]], None] | None,
) -> tuple[AgentResult, str]:
    """Lease, agent, patch. The sandbox is gone when this returns, and with it every process of the agent."""
    repository = repository_of(task)
    spec = SandboxSpec(
        layers=(repository,),
        limits=limits or Limits(),
        ttl_s=agent.limits.wall_s + deadlines.patch_s + 10.0,
        labels={"task": task.id},
    )
    begun = time.perf_counter()
    sandbox = await _lease(backend, spec, deadlines.lease_s)
    timings["lease"] = time.perf_counter() - begun
    try:
        result = await agent.run(session, sandbox, prompt_of(task), sampling, on_step=on_step)
        return result, await _patch(sandbox, repository, deadlines.patch_s)
    except (SandboxGone, DeadlineExceeded) as error:
        raise _Failed("sandbox_gone", str(error), retry=True, counts=False) from error
    except SessionLost as error:
        raise _Failed("engine_lost", str(error), retry=True, counts=False) from error
    except PatchRefused as error:
        raise _Failed("patch_refused", str(error), retry=False, counts=True) from error
    except TimeoutError as error:
        raise _Failed(
            "sandbox_gone", "the changes did not arrive in time", retry=True, counts=False
        ) from error
    finally:
        await sandbox.destroy()


async def _patch(sandbox: Any, repository: Path, deadline_s: float) -> str:
    """What was changed, as a patch. Raises PatchRefused for a tree that code of the model left unreadable, too deep or
    too large: were it the sandbox's fault, a policy could get rid of a run that went badly."""
    try:
        async with asyncio.timeout(deadline_s):
            changes = await sandbox.changes()
        return patch_of(repository, changes)
    except TimeoutError:
        raise
    except (PathRefused, OSError) as error:
        raise PatchRefused(f"the changes cannot be read: {error}") from error


async def _lease(backend: Any, spec: SandboxSpec, deadline_s: float) -> Any:
    try:
        async with asyncio.timeout(deadline_s):
            return await backend.create(spec)
    except (TimeoutError, DeadlineExceeded, SandboxGone) as error:
        detail = str(error) or f"no sandbox within {deadline_s} s"
        raise _Failed("sandbox_gone", detail, retry=True, counts=False) from error


def patch_of(repository: Path, changes: dict[str, bytes | None]) -> str:
    """The patch of what the agent changed, without by-products of running the code; new files are in it."""
    changes = {path: data for path, data in changes.items() if not is_litter(path)}
    base = {path: (repository / path).read_bytes() for path in changes if (repository / path).is_file()}
    return make_patch(base, changes)


async def _grade(
    task: Task, backend: Any, patch: str, deadlines: Deadlines, timings: dict[str, float]
) -> Verdict:
    begun = time.perf_counter()
    try:
        # The grader keeps its own deadline; this one holds should it not.
        async with asyncio.timeout(deadlines.grade_s + 5.0):
            return await grade(backend, task, patch, deadlines.grade_s)
    except TimeoutError as error:
        raise _Failed("grader_timeout", f"over {deadlines.grade_s} s", retry=True, counts=False) from error
    except (SandboxGone, DeadlineExceeded) as error:
        raise _Failed("grader_crashed", str(error), retry=True, counts=False) from error
    finally:
        timings["grade"] = time.perf_counter() - begun
