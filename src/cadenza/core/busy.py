"""When a service was at work: the seconds in all, and the spans for a timeline."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

MERGED_GAP_S = 0.05  # a shorter rest is not worth a span of its own
MOST_SPANS = 10_000  # kept until they are taken; nobody takes those of an evaluation


class BusyClock:
    """Turned on and off by its owner; safe from any thread.

    Args:
        merged_gap_s: rests shorter than this (seconds) are drawn as work in ``take``; ``busy_s`` leaves them out.
        monotonic: seconds that ``busy_s`` is counted in.
        wall: seconds since 1970, which spans are given in, so that services of several processes line up.
    """

    def __init__(
        self,
        merged_gap_s: float = MERGED_GAP_S,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._gap, self._monotonic, self._wall = merged_gap_s, monotonic, wall
        self._lock = threading.Lock()
        self._total = 0.0
        self._since: float | None = None
        self._spans: deque[tuple[float, float]] = deque(maxlen=MOST_SPANS)

    def set(self, at_work: bool) -> None:
        """Says whether work goes on from now; saying it twice changes nothing."""
        with self._lock:
            if at_work == (self._since is not None):
                return
            now = self._monotonic()
            if at_work:
                self._since = now
            else:
                self._close(now)
                self._since = None

    def busy_s(self) -> float:
        """Seconds at work so far, with the span that is open."""
        with self._lock:
            return self._total + (self._monotonic() - self._since if self._since is not None else 0.0)

    def take(self) -> list[tuple[float, float]]:
        """Spans (start, end; seconds since 1970) that were not taken before. One that is open is cut here."""
        with self._lock:
            if self._since is not None:
                now = self._monotonic()
                self._close(now)
                self._since = now
            taken = list(self._spans)
            self._spans.clear()
            # Now, and not at the start: the machine may have slept since.
            to_wall = self._wall() - self._monotonic()
        return [(start + to_wall, end + to_wall) for start, end in taken]

    def _close(self, now: float) -> None:
        assert self._since is not None
        self._total += now - self._since
        if self._spans and self._since - self._spans[-1][1] < self._gap:
            self._spans[-1] = (self._spans[-1][0], now)
        else:
            self._spans.append((self._since, now))
