"""Where services run: in this process, or as Ray actors. The only place that knows the difference.

A service is a plain class whose methods are ordinary functions. ``spawn`` makes one and gives a ``Remote``; a call
returns a ``concurrent.futures.Future`` either way. Calls of one service may overlap (``concurrency`` threads).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from cadenza.core.errors import CadenzaError, ServiceDied
from cadenza.core.memory import is_out_of_memory, out_of_memory

MALLOC = {
    # Keeps freed tensors in the process. Returning them to the system costs a fault per page at the next step:
    # a fifth of a training step on the demo's model.
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
}
OPENMP = {
    # Idle threads of OpenMP spin for a while before they sleep. At the default they keep a core from the threads that
    # run our own kernels: a tenth of a training step's time. Read when torch is loaded.
    "GOMP_SPINCOUNT": "10000",
}


class Remote(ABC):
    """A service somewhere."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> Future[Any]:
        """Starts a call. The future fails with the method's own error, or ServiceDied when the service is gone."""

    async def ask(self, method: str, *args: Any, deadline_s: float) -> Any:
        """Awaits a call. Raises TimeoutError past the deadline."""
        async with asyncio.timeout(deadline_s):
            return await asyncio.wrap_future(self.call(method, *args))


class Placement(ABC):
    """Makes services and ends them; use as a context manager, which kills what it spawned."""

    @abstractmethod
    def spawn(self, name: str, service: type, *args: Any, threads: int = 1, concurrency: int = 4) -> Remote:
        """Constructs ``service(*args)`` somewhere with ``threads`` cores for its products."""

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Shares a large value: what it returns may be passed as an argument of any call."""

    @abstractmethod
    def kill(self, remote: Remote) -> None:
        """Ends a service at once; idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Kills every service."""

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Local(Remote):
    def __init__(self, name: str, service: Any, concurrency: int) -> None:
        self.name, self.service = name, service
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix=name)

    def call(self, method: str, *args: Any) -> Future[Any]:
        try:
            return self._pool.submit(getattr(self.service, method), *args)
        except RuntimeError:  # the pool was shut down
            gone: Future[Any] = Future()
            gone.set_exception(ServiceDied(f"service {self.name} has ended", "run the same command again"))
            return gone

    def end(self) -> None:
        stop = getattr(self.service, "stop", None)
        if stop is not None:
            stop()
        self._pool.shutdown(wait=False, cancel_futures=True)


class InProcess(Placement):
    """Services as objects of this process, for tests and debugging. Never imports Ray."""

    def __init__(self) -> None:
        self._services: list[_Local] = []

    def spawn(self, name: str, service: type, *args: Any, threads: int = 1, concurrency: int = 4) -> Remote:
        remote = _Local(name, service(*args), concurrency)
        self._services.append(remote)
        return remote

    def put(self, value: Any) -> Any:
        return value

    def kill(self, remote: Remote) -> None:
        if remote in self._services:
            self._services.remove(remote)  # type: ignore[arg-type]
            remote.end()  # type: ignore[attr-defined]

    def close(self) -> None:
        for remote in reversed(self._services.copy()):  # those that use others come later
            self.kill(remote)


class _Host:
    """What runs as the actor: keeps an error of the service's construction for its callers. Ray would report it as
    the death of the actor, and a user would not learn that sandboxes are not allowed here."""

    def __init__(self, service: type, *args: Any) -> None:
        self._refused: Exception | None = None
        try:
            self._service = service(*args)
        except Exception as error:
            self._refused = error

    def call(self, method: str, *args: Any) -> Any:
        if self._refused is not None:
            raise self._refused
        return getattr(self._service, method)(*args)


class _Actor(Remote):
    def __init__(self, name: str, handle: Any) -> None:
        self.name, self.handle = name, handle
        self.ended = False

    def call(self, method: str, *args: Any) -> Future[Any]:
        out: Future[Any] = Future()
        if self.ended:  # Ray kills in the background: a call right after could still be answered
            out.set_exception(ServiceDied(f"service {self.name} has ended", "run the same command again"))
            return out

        def settle(inner: Future[Any]) -> None:
            if out.cancelled():
                return
            error = inner.exception()
            with contextlib.suppress(Exception):
                out.set_exception(self._plain(error)) if error is not None else out.set_result(inner.result())

        self.handle.call.remote(method, *args).future().add_done_callback(settle)
        return out

    def _plain(self, error: BaseException) -> BaseException:
        """The service's own error rather than Ray's wrapping of it."""
        from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

        if isinstance(error, RayTaskError) and isinstance(getattr(error, "cause", None), BaseException):
            error = error.cause
        if isinstance(error, CadenzaError):
            return error
        if isinstance(error, OutOfMemoryError) or is_out_of_memory(error):
            return out_of_memory(f"service {self.name}")
        if isinstance(error, RayActorError):
            return ServiceDied(
                f"service {self.name} was killed or crashed",
                "run the same command again to go on; if the system killed it because memory ran low (dmesg says "
                "so), close other programs first",
            )
        return error


def _deaths_into_the_log() -> None:
    """Ray prints a paragraph on a worker's death to stdout, where scripts read JSON, whatever its logging switches say.
    The caller of that worker gets a typed error anyway."""
    from ray._private import worker

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        del ignore_prefix
        logging.getLogger("cadenza.ray").warning("%s", "\n".join(data["lines"]))

    worker.print_to_stdstream = log


class RayPlacement(Placement):
    """Services as Ray actors, on this machine or on the cluster that ``address`` names.

    Args:
        address: None starts a private local Ray; otherwise for example ``ray://head:10001`` or ``auto``.
        memory_bytes: object store size of a private Ray.
    """

    def __init__(self, address: str | None = None, memory_bytes: int = 300_000_000) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray runs workers at niceness 15: whatever else the machine does would then come first.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private Ray listens on this machine alone
        import ray

        self._ray = ray
        self._actors: list[_Actor] = []
        self._names = itertools.count()
        term = signal.getsignal(signal.SIGTERM)
        local = {} if address else {"object_store_memory": memory_bytes, "include_dashboard": False}
        ray.init(
            address=address,
            ignore_reinit_error=True,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            **local,  # type: ignore[arg-type]
        )
        if threading.current_thread() is threading.main_thread():
            # Ray puts handlers of its own there, in Python and below, that end the process with no word or with a dump.
            signal.signal(signal.SIGTERM, term if term is not None else signal.SIG_DFL)
        _deaths_into_the_log()
        self._owns_ray = address is None

    def spawn(self, name: str, service: type, *args: Any, threads: int = 1, concurrency: int = 4) -> Remote:
        # An actor on a cluster that runs already inherits nothing of this process.
        openmp = {name: os.environ.get(name, value) for name, value in OPENMP.items()}
        env = {"OMP_NUM_THREADS": str(threads), **openmp, **MALLOC}
        options = {
            "num_cpus": 0,  # the recipe decides how cores are shared, and it may give two services one core
            "max_concurrency": concurrency,
            "runtime_env": {"env_vars": env},
            "max_restarts": 0,
        }
        actor = self._ray.remote(_Host).options(**options).remote(service, *args)
        remote = _Actor(name, actor)
        self._actors.append(remote)
        return remote

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def kill(self, remote: Remote) -> None:
        if remote in self._actors:
            self._actors.remove(remote)  # type: ignore[arg-type]
            with contextlib.suppress(Exception):
                self._ray.get(remote.handle.call.remote("stop"), timeout=5)  # type: ignore[attr-defined]
            remote.ended = True  # type: ignore[attr-defined]
            self._ray.kill(remote.handle)  # type: ignore[attr-defined]

    def close(self) -> None:
        for remote in reversed(self._actors.copy()):
            self.kill(remote)
        if self._owns_ray:
            self._ray.shutdown()


def make_placement(kind: Literal["ray", "in_process"], address: str | None = None) -> Placement:
    """``in_process`` or ``ray``."""
    return InProcess() if kind == "in_process" else RayPlacement(address)
