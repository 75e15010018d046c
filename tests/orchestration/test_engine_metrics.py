"""Readings of an engine's counters."""

import pytest

from cadenza.orchestration.engine_metrics import EngineMetrics

AT_FIRST = {
    "steps": 100.0, "swaps": 1.0, "busy_s": 2.1, "swap_s": 0.1, "wall_s": 3.0,
    "guessed_1": 10.0, "held_1": 8.0, "guessed_2": 10.0, "held_2": 5.0,
}  # fmt: skip
LATER = {
    "steps": 300.0, "swaps": 3.0, "busy_s": 4.2, "swap_s": 0.2, "wall_s": 9.0,
    "guessed_1": 14.0, "held_1": 9.0, "guessed_2": 14.0, "held_2": 5.0,
}  # fmt: skip


def test_a_step_shows_the_mean_of_the_whole_run():
    metrics = EngineMetrics()
    assert metrics.since_last(AT_FIRST) == pytest.approx(
        {"accepted_1": 0.8, "accepted_2": 0.5, "swap_pause_steps": 0.1 / (2.0 / 100)}
    )
    assert metrics.since_last(LATER) == pytest.approx(
        {"accepted_1": 0.25, "accepted_2": 0.0, "swap_pause_steps": 0.05 / (2.0 / 200)}
    )


def test_what_did_not_happen_is_told_as_zero():
    metrics = EngineMetrics()
    metrics.since_last(LATER)
    assert metrics.since_last(LATER) == {}
    assert metrics.since_last({**LATER, "steps": 310.0, "busy_s": 4.3}) == {}  # neither a swap nor a guess
