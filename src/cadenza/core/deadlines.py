"""Every wait has a deadline with a named cause (invariant 9)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

from cadenza.core.errors import DeadlineExceeded

T = TypeVar("T")


def exceeded(seconds: float, what: str, mend: str | None = None) -> DeadlineExceeded:
    """The error of a wait of ``seconds`` for ``what``."""
    return DeadlineExceeded(
        f"waited {seconds:g} s for {what}", mend or "see the log of the run, then run it again"
    )


@asynccontextmanager
async def deadline(seconds: float, what: str, mend: str | None = None) -> AsyncIterator[None]:
    """Cancels the block after ``seconds`` and raises DeadlineExceeded naming ``what``.

    A TimeoutError raised by the block itself, before the deadline, passes unchanged.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise exceeded(seconds, what, mend) from None
        raise


def wait_until(
    ready: Callable[[], T | None],
    seconds: float,
    what: str,
    mend: str | None = None,
    interval_s: float = 0.01,
) -> T:
    """Calls ``ready`` until it gives something true, and returns that.

    Raises:
        DeadlineExceeded: nothing true within ``seconds``; ``ready`` is called at least once, and once more at the end.
    """
    for _ in ticks(seconds, interval_s):
        value = ready()
        if value:
            return value
    raise exceeded(seconds, what, mend)


def ticks(seconds: float, interval_s: float) -> Iterator[float]:
    """Yields the seconds left, every ``interval_s``, at least once, until ``seconds`` have passed."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        yield max(left, 0.0)
        if left <= 0:
            return
        time.sleep(min(interval_s, left))
