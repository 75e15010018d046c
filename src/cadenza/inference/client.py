"""Token sessions on a remote engine, batched into one exchange at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable

import numpy as np

from cadenza.inference.requests import Completion, Request
from cadenza.inference.requests import Sampling as EngineSampling
from cadenza.tokens import CompactRenderer, Sampled, Sampling, SessionLost

Exchange = Callable[[str, list[Request], list[str], float], Awaitable[list[Completion]]]

WAIT_S = 0.02  # longest hold of one exchange: bounds how long a new request waits behind it


class EngineClient:
    """Gives out sessions; owns the task that trades with the engine. Use within one event loop, then ``aclose``.

    ``waiting`` is how many sessions wait for tokens right now.
    """

    def __init__(self, exchange: Exchange, renderer: CompactRenderer) -> None:
        self._exchange = exchange
        self.renderer = renderer
        self.name = uuid.uuid4().hex[:8]
        self.waiting = 0
        self.on_waiting: Callable[[], None] = lambda: None  # told after every change of ``waiting``
        self._numbers = itertools.count()
        self._requests: list[Request] = []
        self._closed: list[str] = []
        self._answers: dict[str, asyncio.Future[Completion]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.failure: Exception | None = None  # what ended the trade; every session is lost from then on

    def session(self, seed: int) -> EngineSession:
        """A fresh context whose samples depend on ``seed``."""
        if self._task is None:
            self._task = asyncio.create_task(self._trade())
        return EngineSession(self, self.new_name(), seed)

    def new_name(self) -> str:
        """A session's name on the engine, never used before."""
        return f"{self.name}/{next(self._numbers)}"

    async def request(self, request: Request) -> Completion:
        """Raises SessionLost when the engine is gone, also if it went long before, or refuses this request."""
        if self.failure is not None:
            raise SessionLost(str(self.failure))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._answers[request.session] = future
        self._requests.append(request)
        self._wake.set()
        self.waiting += 1
        self.on_waiting()
        try:
            completion = await future
        finally:
            self.waiting -= 1
            self.on_waiting()
            self._answers.pop(request.session, None)
        if completion.finish == "refused":
            raise SessionLost(completion.reason)
        return completion

    def close_session(self, name: str) -> None:
        self._closed.append(name)
        self._wake.set()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # ``failure`` has told it already
                await self._task
            self._task = None

    async def _trade(self) -> None:
        try:
            while True:
                if not self._answers and not self._requests and not self._closed:
                    self._wake.clear()
                    await self._wake.wait()
                requests, self._requests = self._requests, []
                closed, self._closed = self._closed, []
                for completion in await self._exchange(self.name, requests, closed, WAIT_S):
                    future = self._answers.get(completion.session)
                    if future is not None and not future.done():
                        future.set_result(completion)
        except Exception as error:
            self.failure = error
            for future in list(self._answers.values()):
                if not future.done():
                    future.set_exception(SessionLost(str(error)))
            raise


class EngineSession:
    """One context on the engine; implements ``cadenza.tokens.TokenSession``."""

    def __init__(self, client: EngineClient, name: str, seed: int) -> None:
        self._client, self.name, self._seed = client, name, seed
        self._turn = 0
        self._open = True
        self.waited_s = 0.0

    async def sample(self, new_ids: list[int], sampling: Sampling) -> Sampled:
        """Samples one turn. An end that closes a thought goes on sampling in the same turn."""
        end = self._client.renderer.end_id
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        weights: dict[int, str] = {}
        routes: list[np.ndarray] = []
        started = time.perf_counter()
        while True:
            left = sampling.max_tokens - len(ids)
            settings = EngineSampling(temperature=sampling.temperature, max_tokens=left, stop_ids=(end,))
            seed = (self._seed * 1_000_003 + self._turn) & (2**63 - 1)
            self._turn += 1
            done = await self._client.request(Request(self.name, tuple(new_ids), settings, seed))
            ids += done.ids
            logprobs += done.logprobs
            versions += done.versions
            weights |= done.weights
            if done.routes_TLJ is not None:
                routes.append(done.routes_TLJ)
            new_ids = []
            finished = done.finish != "stop" or self._client.renderer.turn_ends(ids)
            if finished or len(ids) >= sampling.max_tokens:
                break
        self.waited_s += time.perf_counter() - started
        stopped = done.finish == "stop" and self._client.renderer.turn_ends(ids)
        return Sampled(
            ids, logprobs, versions, "stop" if stopped else "length", weights=weights,
            routes_TLJ=np.concatenate(routes) if routes else None,
        )  # fmt: skip

    def renew(self) -> None:
        self._client.close_session(self.name)
        self.name = self._client.new_name()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._client.close_session(self.name)
