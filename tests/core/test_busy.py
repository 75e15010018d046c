"""The busy clock: seconds and spans that a report's busy shares and timeline rest on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.core.busy import MOST_SPANS, BusyClock


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def __call__(self) -> float:
        return self.now


def busy_clock(gap: float = 0.5) -> tuple[BusyClock, Clock]:
    clock = Clock()
    return BusyClock(gap, monotonic=clock, wall=lambda: clock() + 1000.0 + clock.slept), clock


def test_short_rests_are_drawn_as_work_but_not_counted_as_work() -> None:
    busy, clock = busy_clock(gap=0.5)
    for at_work, seconds in ((True, 1.0), (False, 0.25), (True, 2.0), (False, 4.0), (True, 1.0)):
        busy.set(at_work)
        clock.now += seconds
    busy.set(False)
    assert busy.busy_s() == pytest.approx(4.0)
    assert busy.take() == [(1100.0, 1103.25), (1107.25, 1108.25)]


def test_a_span_that_is_open_when_taken_is_neither_lost_nor_counted_twice() -> None:
    busy, clock = busy_clock()
    busy.set(True)
    clock.now += 3.0
    assert busy.take() == [(1100.0, 1103.0)]
    clock.now += 2.0
    busy.set(False)
    assert busy.take() == [(1103.0, 1105.0)]
    assert busy.busy_s() == pytest.approx(5.0)


def test_spans_are_an_hour_early_after_the_machine_has_slept_for_one() -> None:
    busy, clock = busy_clock()
    clock.slept = 3600.0
    busy.set(True)
    clock.now += 1.0
    busy.set(False)
    assert busy.take() == [(4700.0, 4701.0)]


def test_spans_that_nobody_takes_pile_up() -> None:
    busy, clock = busy_clock()
    for at_work in (True, False) * (MOST_SPANS + 5):
        busy.set(at_work)
        clock.now += 1.0
    assert len(busy.take()) == MOST_SPANS and busy.busy_s() == MOST_SPANS + 5


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0), st.booleans()), max_size=30))
def test_spans_cover_the_work_whenever_they_are_taken(moves: list[tuple[bool, float, bool]]) -> None:
    busy, clock = busy_clock(gap=0.0)
    taken: list[tuple[float, float]] = []
    worked = 0.0
    for at_work, seconds, take in moves:
        busy.set(at_work)
        clock.now += seconds
        worked += seconds * at_work
        if take:
            taken += busy.take()
    busy.set(False)
    taken += busy.take()
    assert busy.busy_s() == pytest.approx(worked, abs=1e-6)
    assert sum(end - start for start, end in taken) == pytest.approx(worked, abs=1e-6)
    assert all(a[1] <= b[0] + 1e-9 for a, b in zip(taken, taken[1:], strict=False))
