"""Trials as awaitables: an environment that is gone or silent is an error for every waiter, early and late."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
from world_made import tasks

from cadenza.core.errors import DeadlineExceeded, SandboxUnavailable
from cadenza.orchestration import pool as pool_module
from cadenza.orchestration.placement import Remote
from cadenza.orchestration.pool import RolloutPool

pytestmark = pytest.mark.needs_train
(TASK,) = tasks(1)


class Scripted(Remote):
    """Answers ``collect`` with what ``answer`` gives or raises."""

    def __init__(self, answer) -> None:
        self.answer, self.orders = answer, []

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if method == "submit":
            self.orders += args[0]
            future.set_result(None)
            return future
        try:
            future.set_result(self.answer(self.orders))
        except Exception as error:
            future.set_exception(error)
        return future


def test_a_trial_ordered_after_the_environment_ended_waits_for_ever():
    def gone(_orders):
        raise SandboxUnavailable("namespaces are refused", "allow them")

    async def go() -> None:
        async with RolloutPool(Scripted(gone)) as pool:
            for _ in range(3):
                with pytest.raises(SandboxUnavailable):
                    await asyncio.wait_for(pool.trial(TASK, 0, 1, 1.0), 10)

    asyncio.run(go())


def test_a_trial_that_is_never_reported_waits_for_ever(monkeypatch):
    monkeypatch.setattr(pool_module, "IDLE_DEADLINE_S", 0.05)

    async def go() -> None:
        async with RolloutPool(Scripted(lambda _orders: [])) as pool:
            with pytest.raises(DeadlineExceeded, match="no trial ended"):
                await asyncio.wait_for(pool.trial(TASK, 0, 1, 1.0), 10)

    asyncio.run(go())


def test_a_second_attempt_gets_the_first_ones_answer():
    async def go() -> list[Any]:
        remote = Scripted(lambda orders: [(o.slot, o.seed) for o in orders])
        async with RolloutPool(remote) as pool:
            return [await asyncio.wait_for(pool.trial(TASK, 0, seed, 1.0), 10) for seed in (1, 2)]

    assert asyncio.run(go()) == [1, 2]
