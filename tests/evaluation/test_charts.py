"""A chart must stay inside its frame and its numbers must be readable, whatever the data."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.evaluation.charts import (
    HEIGHT,
    WIDTH,
    Line,
    line_chart,
    number,
    running_mean,
    signed,
    strip,
    strip_svg,
    ticks,
)

finite = st.floats(-1e9, 1e9, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(finite, min_size=1, max_size=60), st.booleans(), st.booleans())
def test_every_point_lies_inside_the_frame_and_the_svg_is_well_formed(ys, zero, smooth):
    svg = line_chart(
        [Line("a <b>", range(len(ys)), ys, smooth=smooth)], title="t & u", x_label="step", zero=zero
    )
    ElementTree.fromstring(svg)
    for points in re.findall(r'points="([^"]*)"', svg):
        for point in points.split():
            x, y = map(float, point.split(","))
            assert -0.1 <= x <= WIDTH + 0.1 and -0.1 <= y <= HEIGHT + 0.1


def test_nothing_to_draw_is_an_error_and_not_an_empty_frame():
    with pytest.raises(ValueError):
        line_chart([Line("a", [], [])], title="t", x_label="step")


@given(finite, finite)
def test_ticks_are_few_round_and_inside(a, b):
    low, high = min(a, b), max(a, b)
    found = ticks(low, high)
    assert 1 <= len(found) <= 11
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert all(low - slack <= t <= high + slack for t in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.35, "0.35"),
        (12, "12"),
        (1234, "1234"),
        (34_000, "34k"),
        (1_200_000, "1.2M"),
        (3e-5, "3e-05"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_signs():
    assert [signed(x) for x in (1.25, -0.44, 0.01, -0.01)] == ["+1.2", "−0.4", "0.0", "0.0"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 9))
def test_a_running_mean_stays_within_the_values(ys, window):
    mean = running_mean(ys, window)
    assert len(mean) == len(ys)
    assert all(min(ys) - 1e-9 <= m <= max(ys) + 1e-9 for m in mean)


def test_overlapping_spans_are_busy_once_and_instants_are_marks():
    lane = strip("engine", [(0, 4), (2, 6), (9, 9), (20, 30)], 0, 10, bins=10)
    assert lane.busy == pytest.approx(0.6) and lane.marks == [0.9]
    assert lane.blocks == [(0.0, 0.2, 0.5), (0.2, 0.2, 1.0), (0.4, 0.2, 0.5)]
    ElementTree.fromstring(strip_svg(lane))


def test_a_share_is_drawn_on_an_axis_of_impossible_values():
    def labels(ys):
        svg = line_chart([Line("solved", range(len(ys)), ys)], title="t", x_label="step", percent=True)
        return [float(text) for text in re.findall(r">(-?[0-9.]+)%<", svg)]

    for ys in ([0.0], [0.0, 0.0], [1.0], [0.0, 1.0], [0.97, 1.0], [0.02, 0.3]):
        assert all(0.0 <= tick <= 100.0 for tick in labels(ys)), ys
    assert max(labels([0.5, 1.6])) > 100.0  # busy shares of several services


def test_a_short_run_has_fractions_of_a_step():
    svg = line_chart([Line("loss", [1, 2, 3], [3.0, 2.0, 1.0])], title="t", x_label="step")
    assert not re.search(r'middle">\d+\.\d+<', svg)
