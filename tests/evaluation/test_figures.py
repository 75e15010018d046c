"""A figure line is followed over years: its shape, names and provenance must hold."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from cadenza.core.errors import CorruptArtifact
from cadenza.evaluation.figures import Figure, points, read_figures, write_figures
from cadenza.evaluation.statistics import TaskValues, estimate


def test_a_line_carries_interval_machine_and_command(tmp_path):
    change = estimate([TaskValues(("a", "b", "c"), np.array([0.0, 0.5, 0.25]), (-1, 1))])
    path = tmp_path / "first_loop.jsonl"
    write_figures(path, [points("rl_gain_points", change, seeds=[0, 1, 2])])
    body = json.loads(path.read_text())
    assert body["figure"] == "rl_gain_points" and body["value"] == 25.0 and body["unit"] == "points"
    assert body["interval"][0] <= 25.0 <= body["interval"][1]
    assert body["seeds"] == [0, 1, 2] and body["n"] == 3 and body["better"] == "higher"
    assert {"cpu", "cores", "python", "torch"} == set(body["machine"]) and body["command"]
    assert "peer" not in body
    assert read_figures(path)[0].value == 25.0


def test_a_figure_that_is_not_finite_is_never_written():
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError):
            Figure(figure="x", value=value, unit="s", better="lower")
    with pytest.raises(ValueError):
        Figure(figure="x", value=1, unit="s", better="sideways")


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"figure": "x"}\n')
    with pytest.raises(CorruptArtifact, match=":1"):
        read_figures(path)
