"""Trials on the environment service as awaitables, for evaluation and probes: order, wait, get the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import time

from cadenza.core.errors import DeadlineExceeded
from cadenza.core.types import Rollout, Task
from cadenza.orchestration.environment import Order
from cadenza.orchestration.placement import Remote

COLLECT_S = 0.25
IDLE_DEADLINE_S = 180.0


class RolloutPool:
    """Use as an async context manager within one event loop; the environment service belongs to the caller."""

    def __init__(self, environment: Remote) -> None:
        self._environment = environment
        self._waiting: dict[tuple[str, int, int], asyncio.Future[Rollout]] = {}
        self._orders: list[Order] = []
        self._attempts: dict[tuple[str, int], int] = {}
        self._pump: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def __aenter__(self) -> RolloutPool:
        self._pump = asyncio.create_task(self._trade())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._pump

    async def trial(self, task: Task, sample: int, seed: int, temperature: float) -> Rollout:
        """Runs one trial. Raises what ended the environment service, or DeadlineExceeded when nothing moves."""
        if self._failure is not None:
            raise self._failure
        attempt = self._attempts.get((task.id, sample), -1) + 1
        self._attempts[task.id, sample] = attempt
        slot = (task.id, sample, attempt)
        future: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._waiting[slot] = future
        self._orders.append(Order(slot, task, seed, temperature))
        return await future

    async def _trade(self) -> None:
        moved = time.monotonic()
        try:
            while True:
                orders, self._orders = self._orders, []
                if orders:
                    await self._environment.ask("submit", orders, deadline_s=30.0)
                done = await self._environment.ask("collect", COLLECT_S, deadline_s=IDLE_DEADLINE_S)
                if done or orders or not self._waiting:
                    moved = time.monotonic()
                elif time.monotonic() - moved > IDLE_DEADLINE_S:
                    raise TimeoutError
                for slot, rollout in done:
                    future = self._waiting.pop(tuple(slot), None)
                    if future is not None and not future.done():
                        future.set_result(rollout)
        except BaseException as error:
            told: BaseException = error
            if isinstance(error, TimeoutError):
                told = DeadlineExceeded(
                    f"no trial ended within {IDLE_DEADLINE_S:.0f} s", "run the same command again"
                )
            self._failure = told if isinstance(told, Exception) else None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(told) if isinstance(told, Exception) else future.cancel()
            raise
