"""Prompts are drawn once each, wherever rewards have led the running rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world_made import tasks

from cadenza.orchestration.curriculum import Curriculum, CurriculumConfig

pytestmark = pytest.mark.needs_train


@given(
    count=st.integers(0, 40),
    seed=st.integers(0, 99),
    adaptive=st.booleans(),
    rates=st.lists(st.floats(-2, 2), max_size=40),
)
def test_a_prompt_is_drawn_twice_or_a_negative_rate_breaks_the_draw(count, seed, adaptive, rates):
    """A penalty can make a mean reward negative; the root of p (1 - p) is then not a real number."""
    curriculum = Curriculum(tasks(count), seed, CurriculumConfig(adaptive=adaptive))
    drawn = []
    while (task := curriculum.draw()) is not None:
        drawn.append(task.id)
        if rates:
            curriculum.observe(task, rates[len(drawn) % len(rates)])
        assert curriculum.left == count - len(drawn)
    assert sorted(drawn) == [t.id for t in tasks(count)]


def test_a_stratum_that_is_always_solved_is_drawn_as_often_as_one_that_is_not():
    first = {}
    for seed in range(40):
        curriculum = Curriculum(tasks(60), seed, CurriculumConfig(memory=0.0, floor=0.05))
        for task in tasks(3):
            curriculum.observe(task, {"f0": 1.0, "f1": 0.5, "f2": 0.0}[task.metadata["families"][0]])
        for _ in range(10):
            task = curriculum.draw()
            assert task is not None
            family = task.metadata["families"][0]
            first[family] = first.get(family, 0) + 1
    assert first["f1"] > 4 * max(first["f0"], first["f2"]) > 0


def test_planned_prompts_are_drawn_again_after_a_resume():
    curriculum = Curriculum(tasks(10), 0, CurriculumConfig())
    curriculum.forget({"t001", "t002"})
    drawn = {t.id for t in iter(curriculum.draw, None)}
    assert drawn == {t.id for t in tasks(10)} - {"t001", "t002"}
