"""Group commit: many small writes from many threads become one transaction, at most every 50 ms.

A write that comes after a quiet time, or that somebody waits for, is committed at once with all that is queued; the
rest shares a commit every interval. Each write runs in a savepoint, so one that fails fails alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from cadenza.core.schema import database_errors

Write = Callable[[sa.Connection], Any]


class GroupedWriter:
    """Owns the one writing thread of a database in this process.

    Args:
        engine: begins write transactions.
        where: the database's name in messages.
        interval_s: least time between two commits.
    """

    def __init__(self, engine: sa.Engine, where: str, interval_s: float = 0.05) -> None:
        self._engine = engine
        self._where = where
        self._interval_s = interval_s
        self._queue: queue.SimpleQueue[tuple[Write, Future[Any], bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.commits = 0

    def submit(self, write: Write, urgent: bool = True) -> Future[Any]:
        """Queues a write; the future resolves to what it returns, after the commit. Order is kept.

        Args:
            urgent: somebody waits for it, so it does not wait for the interval to pass.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the run database {self._where} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rundb-writer", daemon=True)
                self._thread.start()
            future: Future[Any] = Future()
            self._queue.put((write, future, urgent))
            return future

    def close(self) -> None:
        """Commits what is queued and ends the thread. May be called twice."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        last_commit = 0.0
        while True:
            first = self._queue.get()
            if first is None:
                return
            group, urgent, ended = [first[:2]], first[2], False
            wake = last_commit + self._interval_s
            while not ended:
                wait = 0.0 if urgent else wake - time.monotonic()
                try:
                    item = self._queue.get(timeout=wait) if wait > 0 else self._queue.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    ended = True
                else:
                    group.append(item[:2])
                    urgent = urgent or item[2]
            self._commit(group)
            last_commit = time.monotonic()
            if ended:
                return

    def _commit(self, group: list[tuple[Write, Future[Any]]]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        try:
            with database_errors(self._where), self._engine.begin() as connection:
                for write, future in group:
                    try:
                        with connection.begin_nested():
                            done.append((future, write(connection)))
                    except OperationalError:
                        raise  # the disk, not this write: the whole group fails
                    except Exception as error:
                        future.set_exception(error)
            self.commits += 1
        except BaseException as error:
            for _, future in group:
                if not future.done():
                    future.set_exception(error)
            return
        for future, result in done:
            future.set_result(result)
