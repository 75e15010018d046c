"""The environment service: runs trials in sandboxes of its machine, talking to the engine for tokens.

Orders come in, rollouts go out, both in batches. Inside, one asyncio loop in a thread drives every agent; nothing here
decides what to run or what to do about a failure, that is the reconciler's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cadenza.core.busy import BusyClock
from cadenza.core.config import StrictConfig
from cadenza.core.errors import CadenzaError, DeadlineExceeded, RolloutFailure, ServiceDied
from cadenza.core.memory import is_out_of_memory, out_of_memory
from cadenza.core.types import Rollout, Task, Verdict
from cadenza.harness import Agent, Limits, demo_tools
from cadenza.inference.client import EngineClient
from cadenza.orchestration.placement import Remote
from cadenza.rewards import RewardConfig
from cadenza.rollouts import Deadlines, run_trial
from cadenza.sandbox.local import LocalBackend
from cadenza.sandbox.spec import LocalConfig
from cadenza.tokens import CompactRenderer, Sampling, Tokenizer

EXCHANGE_DEADLINE_S = 60.0


class EnvironmentConfig(StrictConfig):
    """``backend``: of the sandboxes, chosen by name and never replaced by another (invariant 12). ``sandboxes``: trials
    that hold one at once; further orders wait. ``agent``: limits of a run. ``deadlines``: of the parts of a trial.
    ``rewards``: what a rollout is worth. ``local``: settings of the backend ``local``."""

    backend: Literal["local"] = "local"
    sandboxes: int = Field(default=64, gt=0)
    agent: Limits = Limits()
    deadlines: Deadlines = Deadlines()
    rewards: RewardConfig = RewardConfig()
    local: LocalConfig = LocalConfig()


@dataclass(frozen=True)
class Order:
    """One trial to run. ``slot`` names (group, member, attempt) to whoever ordered it."""

    slot: tuple[str, int, int]
    task: Task
    seed: int
    temperature: float


class EnvironmentService:
    """Runs orders until ``stop``. Methods may be called from any thread."""

    def __init__(self, engine: Remote, tokenizer_directory: str, config: EnvironmentConfig) -> None:
        self._engine, self._config = engine, config
        renderer = CompactRenderer(Tokenizer.load(Path(tokenizer_directory)))
        self._agent = Agent(renderer, demo_tools(), config.agent)
        self._renderer = renderer
        self._finished: list[tuple[tuple[str, int, int], Rollout]] = []
        self._changed = threading.Condition()
        self._failure: CadenzaError | None = None
        self._active = 0
        self._at_work = BusyClock()
        self._started = time.monotonic()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()
        self._ready.result(timeout=60)

    def submit(self, orders: list[Order]) -> None:
        """Queues trials. Raises what ended the service: ServiceDied when the backend or the engine is gone."""
        self._check()
        self._loop.call_soon_threadsafe(self._begin, orders)

    def collect(self, wait_s: float) -> list[tuple[tuple[str, int, int], Rollout]]:
        """Finished trials, waiting up to ``wait_s`` for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._failure, wait_s)
            self._check()
            done, self._finished = self._finished, []
            return done

    def stats(self) -> dict[str, float]:
        """``busy_s``: time during which some trial was doing anything but waiting for tokens; ``wall_s``;
        ``active``. Raises what ended the service."""
        self._check()
        return {
            "busy_s": self._at_work.busy_s(),
            "wall_s": time.monotonic() - self._started,
            "active": float(self._active),
        }

    def take_spans(self) -> list[tuple[str, float, float]]:
        """(lane, start, end; seconds since 1970) of the work since the last call, for a timeline."""
        return [("environment", start, end) for start, end in self._at_work.take()]

    def cancel(self) -> None:
        """Drops queued orders and ends running trials; their slots are never reported."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(timeout=30)

    def stop(self) -> None:
        """Ends every sandbox and the loop."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(timeout=20)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._thread.is_alive():
            raise ServiceDied("the environment service has ended", "run the same command again to go on")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._fail(error)
            if not self._ready.done():
                self._ready.set_exception(self._failure or error)

    def _fail(self, error: BaseException) -> None:
        """From now on every call raises what ended the service; the first cause stays."""
        if not isinstance(error, CadenzaError):
            error = (
                out_of_memory("the environment service")
                if is_out_of_memory(error)
                else ServiceDied(
                    f"the environment service failed: {error!r}",
                    "run the same command again to go on; if it fails again, report it with this line",
                )
            )
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._room = asyncio.Semaphore(self._config.sandboxes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._client = EngineClient(self._exchange, self._renderer)
        self._client.on_waiting = self._meter
        async with LocalBackend(self._config.local) as backend:
            self._backend = backend
            self._ready.set_result(None)
            await self._end.wait()
            await self._cancel_all()
            await self._client.aclose()

    async def _exchange(self, client: str, requests: list[Any], closed: list[str], wait_s: float) -> Any:
        try:
            return await self._engine.ask(
                "exchange", client, requests, closed, wait_s, deadline_s=EXCHANGE_DEADLINE_S
            )
        except TimeoutError:
            error = ServiceDied("the engine does not answer", "run the same command again to go on")
            self._fail(error)
            raise error from None
        except Exception as error:  # without an engine every trial would fail, and use up a prompt
            self._fail(error)
            raise

    def _begin(self, orders: list[Order]) -> None:
        for order in orders:
            task = self._loop.create_task(self._trial(order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _trial(self, order: Order) -> None:
        async with self._room:
            self._active += 1
            self._meter()
            try:
                rollout = await self._run_one(order)
            except (
                Exception
            ) as error:  # a defect, or a backend that is gone: the slot would never be reported
                self._fail(error)
                return
            finally:
                self._active -= 1
                self._meter()
        with self._changed:
            self._finished.append((order.slot, rollout))
            self._changed.notify_all()

    async def _run_one(self, order: Order) -> Rollout:
        group = order.slot[0]
        session = self._client.session(order.seed)
        config = self._config
        sampling = Sampling(temperature=order.temperature, max_tokens=config.agent.max_tokens_per_turn)
        try:
            rollout = await run_trial(
                order.task, session, self._backend, self._agent, sampling, order.seed, group,
                config.deadlines, rewards=config.rewards,
            )  # fmt: skip
        except (DeadlineExceeded, FileNotFoundError) as error:
            rollout = lost(order, str(error))
        return replace_id(rollout, order)

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _meter(self) -> None:
        """Trials that hold a sandbox and do not wait for the engine are at work."""
        self._at_work.set(self._active > self._client.waiting)


def lost(order: Order, detail: str) -> Rollout:
    """The rollout of a trial whose environment broke: a typed failure, to be run again and never trained on."""
    failure = RolloutFailure("sandbox_gone", detail[:300], retry=True, counts=False)
    return Rollout(
        id="", group_id=order.slot[0], task_id=order.task.id, segments=[], trace=[], patch="",
        verdict=Verdict(None, failure), rewards={}, reward=None, status="failed", timings={}, seed=order.seed,
    )  # fmt: skip


def replace_id(rollout: Rollout, order: Order) -> Rollout:
    """Names the rollout after its slot, so that a group's members are distinct and a retry is the same member."""
    group, member, _ = order.slot
    return replace(rollout, id=f"{group}/{member}")
