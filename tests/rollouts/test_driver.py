from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cadenza.core.errors import RolloutFailure
from cadenza.core.types import Rollout, Task, Verdict
from cadenza.rollouts import Trial, run_trials

TASK = Task("t", Path("."), "train", 0, "test", "2026-01-01")


def rollout(trial: Trial, verdict: Verdict | None = None) -> Rollout:
    return Rollout(
        f"{trial.group_id}.{trial.seed}", trial.group_id, "t", [], [], "", verdict or Verdict(1.0), {}, 1.0, "finished",
        {}, trial.seed,
    )  # fmt: skip


def trials(count):
    return [Trial(TASK, seed, "g") for seed in range(count)]


def test_results_keep_the_order_of_the_trials_and_the_limit_holds():
    running = most = 0
    done = []

    async def one(trial):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(20 - trial.seed):
            await asyncio.sleep(0)
        running -= 1
        return rollout(trial)

    results = asyncio.run(
        run_trials(trials(20), one, concurrency=3, on_done=lambda n, trial, r: done.append((n, trial.seed)))
    )
    assert [r.seed for r in results] == list(range(20))
    assert most == 3 and [n for n, _ in done] == list(range(1, 21))


def test_a_retryable_failure_is_run_again_and_the_models_own_is_not():
    tries: dict[int, int] = {}

    async def one(trial):
        tries[trial.seed] = tries.get(trial.seed, 0) + 1
        retry = trial.seed != 2
        if trial.seed == 0 and tries[0] == 2:
            return rollout(trial)
        return rollout(
            trial, Verdict(None, RolloutFailure("sandbox_gone", "", retry=retry, counts=not retry))
        )

    results = asyncio.run(run_trials(trials(3), one, attempts=3))
    assert tries == {0: 2, 1: 3, 2: 1}
    assert results[0].verdict.score == 1.0 and results[1].verdict.failure is not None


def test_an_exception_cancels_the_others_and_is_raised_as_itself():
    cancelled = []

    async def one(trial):
        if trial.seed == 3:
            raise FileNotFoundError("task directory")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(trial.seed)
            raise
        return rollout(trial)

    with pytest.raises(FileNotFoundError):
        asyncio.run(run_trials(trials(100), one, concurrency=4))
    assert sorted(cancelled) == [0, 1, 2]


def test_a_long_iterable_is_not_read_ahead():
    read = 0

    def endless():
        nonlocal read
        for trial in trials(50):
            read += 1
            yield trial

    async def one(trial):
        await asyncio.sleep(0)
        assert read <= trial.seed + 2
        return rollout(trial)

    asyncio.run(run_trials(endless(), one, concurrency=1))
