"""A wait ends at its deadline and says what it waited for; an error of the work itself passes unchanged."""

import asyncio
import time

import pytest

from cadenza.core.deadlines import deadline, ticks, wait_until
from cadenza.core.errors import DeadlineExceeded


def test_an_endless_wait_ends_and_names_its_cause():
    async def work():
        async with deadline(0.01, "the engine's answer", "restart the engine"):
            await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for the engine's answer; restart the engine"):
        asyncio.run(work())


def test_a_timeout_inside_the_block_is_not_mistaken_for_ours():
    async def work():
        async with deadline(60, "everything"):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as failure:
        asyncio.run(work())
    assert not isinstance(failure.value, DeadlineExceeded)


def test_cancelling_the_task_passes_through():
    async def work():
        async def inner():
            async with deadline(60, "x"):
                await asyncio.Event().wait()

        task = asyncio.create_task(inner())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())


def test_waiting_for_something_true_returns_it_at_once():
    answers = iter([None, 0, "ready"])
    assert wait_until(lambda: next(answers), 5, "an answer", interval_s=0.001) == "ready"


def test_a_wait_of_no_time_still_looks_once():
    assert wait_until(lambda: 3, 0, "x") == 3
    with pytest.raises(DeadlineExceeded, match="waited 0 s for x"):
        wait_until(lambda: None, 0, "x")


def test_ticks_end_near_the_deadline():
    begun = time.monotonic()
    left = list(ticks(0.05, 0.01))
    assert 0.05 <= time.monotonic() - begun < 30
    assert left[-1] == 0.0
