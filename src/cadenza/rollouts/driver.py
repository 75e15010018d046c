"""Runs many trials at once, for demonstrations and evaluation. The RL run has its reconciler instead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from cadenza.core.types import Rollout, Task


@dataclass(frozen=True, slots=True)
class Trial:
    """What to run: one task with one seed, in one group."""

    task: Task
    seed: int
    group_id: str


async def run_trials(
    trials: Iterable[Trial],
    run_one: Callable[[Trial], Awaitable[Rollout]],
    *,
    concurrency: int = 8,
    attempts: int = 2,
    on_done: Callable[[int, Trial, Rollout], None] | None = None,
) -> list[Rollout]:
    """Runs every trial, at most ``concurrency`` at once, and returns the rollouts in the order of ``trials``.

    Args:
        run_one: opens a session and calls ``run_trial``.
        attempts: a rollout whose verdict says ``retry`` is run again up to this many times in all; the last one is
            returned, failed or not.
        on_done: called with (number finished so far, trial, rollout) as each ends.

    The first exception of ``run_one`` cancels the others and is raised.
    """
    if concurrency < 1 or attempts < 1:
        raise ValueError("concurrency and attempts must be at least 1")
    slots = asyncio.Semaphore(concurrency)
    results: dict[int, Rollout] = {}

    async def one(index: int, trial: Trial) -> None:
        try:
            rollout = await run_one(trial)
            for _ in range(attempts - 1):
                if rollout.verdict.failure is None or not rollout.verdict.failure.retry:
                    break
                rollout = await run_one(trial)
            results[index] = rollout
            if on_done is not None:
                on_done(len(results), trial, rollout)
        finally:
            slots.release()

    try:
        async with asyncio.TaskGroup() as group:
            for index, trial in enumerate(trials):
                await slots.acquire()  # before the task exists, so that a long iterable is not read ahead
                group.create_task(one(index, trial))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[index] for index in range(len(results))]
