"""The inference service: an engine stepped by one thread, spoken to in batches.

Clients trade in one call: hand over new requests and closed sessions, take what has finished since. One such
call is in flight per client, so that a hundred rollouts cost one message every few milliseconds and not one each.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from cadenza.core.busy import BusyClock
from cadenza.core.errors import ServiceDied
from cadenza.inference.requests import Completion, EngineConfig, Request
from cadenza.weights import ChainAddress, Follower, Link

if TYPE_CHECKING:
    from torch import Tensor


class EngineService:
    """Owns the engine and its thread; ``stop`` ends both. Methods may be called from any thread.

    Args:
        model_directory: a Hugging Face directory, see ``cadenza.model.hf``.
        version: policy version of those weights.
    """

    def __init__(self, model_directory: str, config: EngineConfig, version: int = 0) -> None:
        # Imported here: a process that only holds a handle on this service has no need of torch.
        from cadenza.inference.engine import Engine
        from cadenza.model.hf import load_model

        self._threads = config.threads
        self._niceness = config.niceness
        self._engine = Engine(load_model(Path(model_directory)), version, config)
        self._lock = threading.Condition()
        self._owner: dict[str, str] = {}  # session -> client
        self._outbox: dict[str, list[Completion]] = defaultdict(list)
        self._inbox: list[tuple[str, Request]] = []
        self._closed: list[str] = []
        self._chain: ChainAddress | None = None
        self._follower: Follower | None = None
        self._following = threading.Lock()
        self._failure: str | None = None
        self._stopping = False
        self._at_work = BusyClock()
        self._swaps: list[float] = []  # seconds since 1970
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def exchange(
        self, client: str, requests: list[Request], closed: list[str], wait_s: float
    ) -> list[Completion]:
        """Takes requests and closed sessions; returns the client's finished requests, waiting up to ``wait_s``
        for the first. Raises ServiceDied once the engine's thread has failed or was stopped."""
        with self._lock:
            self._inbox += [(client, r) for r in requests]
            self._closed += closed
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._outbox[client] or self._failure or self._stopping, wait_s)
            self._check()
            done, self._outbox[client] = self._outbox[client], []
            return done

    def follow(self, chain: ChainAddress, version: int, deadline_s: float) -> Link:
        """Goes to ``version`` of a chain, or a later one, when it has been published; returns its link. Requests handed
        over after this returns are sampled under it. Fetching and rebuilding go on beside decoding.

        Raises ServiceDied, DeadlineExceeded, or what a follower raises: it then serves what it served.
        """
        from cadenza.weights.tensors import tensors_of

        with self._following:
            if self._chain != chain:
                self._chain, self._follower = chain, Follower.at(chain)
            assert self._follower is not None
            link = self._follower.wait_for(version, deadline_s)
            assert self._follower.state is not None
            self.load(tensors_of(self._follower.state), link.version)
        return link

    def load(self, state: dict[str, Tensor], version: int) -> None:
        """New weights, swapped in between two decode steps while requests stay alive. Requests handed over after
        this returns are sampled under them. Raises ServiceDied."""
        with self._lock:
            self._check()
            self._engine.load(state, version)
            self._lock.notify_all()

    def digest(self) -> str:
        """Of the weights that are served now, as it is echoed with every sample. Raises ServiceDied."""
        with self._lock:
            self._check()
            return self._engine.digest

    def set_threads(self, threads: int) -> None:
        """Cores for the engine's products from now on (a synchronous run gives them all to one side at a time)."""
        self._threads = threads

    def stats(self) -> dict[str, float]:
        """Counters since the start, with ``busy_s``, ``wall_s``, ``swap_s`` (of ``busy_s``, without a token decoded)
        and ``version``. Raises ServiceDied."""
        with self._lock:
            self._check()
            e = self._engine
            return {
                **e.counters,
                "busy_s": self._at_work.busy_s(),
                "wall_s": time.monotonic() - self._started,
                "swap_s": e.swap_s,
                "version": float(e.version),
            }

    def take_spans(self) -> list[tuple[str, float, float]]:
        """(lane, start, end; seconds since 1970) of the work since the last call, for a timeline. A swap of weights is
        an instant in the lane ``weights``."""
        with self._lock:
            swaps, self._swaps = self._swaps, []
        return [("engine", a, b) for a, b in self._at_work.take()] + [("weights", t, t) for t in swaps]

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        self._thread.join(timeout=10)

    def _check(self) -> None:
        if self._failure:
            raise ServiceDied(
                f"the inference engine failed: {self._failure}", "run the same command again to go on"
            )
        if self._stopping:
            raise ServiceDied("the inference engine was stopped", "run the same command again to go on")

    def _run(self) -> None:
        import torch

        threads = 0
        try:
            # A thread has a niceness of its own on Linux.
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + self._niceness)
            while True:
                self._at_work.set(False)
                with self._lock:
                    # Weights are swapped at once even when nothing is running, so that the version is never behind.
                    self._lock.wait_for(
                        lambda: (
                            self._stopping
                            or self._inbox
                            or self._closed
                            or self._engine.pending
                            or not self._engine.idle
                        )
                    )
                    if self._stopping:
                        return
                    self._take()
                if self._threads != threads:
                    # OpenMP keeps the number per thread: set from a caller's thread it would change nothing here.
                    threads = self._threads
                    torch.set_num_threads(threads)
                self._at_work.set(True)
                swaps = self._engine.counters["swaps"]
                done = self._engine.step()
                swapped = self._engine.counters["swaps"] > swaps
                if done or swapped:
                    with self._lock:
                        self._swaps += [time.time()] * swapped
                        for completion in done:
                            self._outbox[self._owner[completion.session]].append(completion)
                        self._lock.notify_all()
        except BaseException as error:
            with self._lock:
                self._failure = f"{type(error).__name__}: {error}"
                self._lock.notify_all()
        finally:
            self._at_work.set(False)

    def _take(self) -> None:
        # Requests first: a session given up before its request was handed over comes with both, and must end closed.
        for client, request in self._inbox:
            self._owner[request.session] = client
            try:
                self._engine.submit(request)
            except ValueError as error:  # one bad request is its sender's business alone
                refused = Completion(request.session, (), (), (), "refused", str(error))
                self._outbox[client].append(refused)
                self._lock.notify_all()
        self._inbox = []
        for name in self._closed:
            self._engine.close(name)
            self._owner.pop(name, None)
        self._closed = []
