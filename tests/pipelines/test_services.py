"""Agents that work under other limits than those their model has learned to keep to."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza.harness import Limits, save_limits
from cadenza.harness.windows import WindowConfig
from cadenza.pipelines.plan import plan_recipe
from cadenza.pipelines.services import tell_other_limits

TRAINED = Limits(windows=WindowConfig(mode="summary", trigger=512))


@pytest.fixture
def context(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING)
    lines: list[str] = []
    progress = SimpleNamespace(line=lines.append)
    return SimpleNamespace(name="rl", progress=progress, logger=logging.getLogger("stage"), lines=lines)


def test_a_context_that_ends_elsewhere_than_the_model_has_learned_is_told(
    tmp_path: Path, context: Any, caplog
):
    save_limits(TRAINED, tmp_path)
    other = TRAINED.model_copy(update={"windows": WindowConfig(mode="summary", trigger=640), "max_turns": 9})
    found = tell_other_limits(context, tmp_path, other)
    assert found == ["max_turns: 24 -> 9", "windows.trigger: 512 -> 640"]
    assert context.lines == [caplog.messages[0]] and "rl: the model in" in caplog.messages[0]


def test_the_same_limits_and_a_model_that_no_agent_trained_are_not_told(tmp_path: Path, context: Any):
    assert tell_other_limits(context, tmp_path, TRAINED) == []
    save_limits(TRAINED, tmp_path)
    assert tell_other_limits(context, tmp_path, TRAINED.model_copy(update={"wall_s": 5.0})) == []
    assert context.lines == []


@pytest.mark.parametrize("recipe", ["demo", "demo-quick"])
def test_a_shipped_recipe_whose_stages_disagree_about_the_limits(recipe: str):
    found = set()
    for stage in plan_recipe(recipe).stages:
        config: Any = stage.config
        agent = (
            getattr(config, "agent", None)
            or getattr(getattr(config, "services", None), "environment", SimpleNamespace(agent=None)).agent
        )
        if agent is not None:
            found.add(agent.model_copy(update={"wall_s": 1.0}).model_dump_json())
    assert len(found) == 1
