"""A recipe of example stages, and running it in a folder or in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.pipelines import RunOutcome, make_plan, run_plan

RECIPE: list[dict[str, Any]] = [
    {"name": "numbers", "kind": "example_stages:Numbers"},
    {"name": "sum", "kind": "example_stages:Sum"},
    {"name": "counter", "kind": "example_stages:Counter"},
    {"name": "again", "kind": "example_stages:Sum", "inputs": {"numbers": "numbers"}},
]


def recipe_toml(**changes: dict[str, Any]) -> str:
    from cadenza.core.recipes import to_toml

    stages = [{**stage, **changes.get(stage["name"], {})} for stage in RECIPE]
    return to_toml({"name": "example", "stage": stages})


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunOutcome]:
    """Runs the example recipe with changes a stage: ``run(counter={"steps": 3}, restart_from="sum")``."""

    def go(only: tuple[str, ...] = (), **arguments: Any) -> RunOutcome:
        changes = {name: arguments.pop(name) for name in [s["name"] for s in RECIPE] if name in arguments}
        stages = [
            {**stage, **changes.get(stage["name"], {})}
            for stage in RECIPE
            if not only or stage["name"] in only
        ]
        plan = make_plan({"name": "example", "seed": arguments.pop("seed", 0), "stage": stages})
        return run_plan(plan, tmp_path / "runs" / "example", **arguments)

    return go


@pytest.fixture
def train(
    tmp_path: Path, command_environment: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``cadenza train`` on the example recipe in a process: ``train("--set", "counter.steps=3")``."""
    (tmp_path / "example.toml").write_text(recipe_toml())

    def go(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cadenza", "train", "./example.toml", *arguments]
        return subprocess.run(
            command,
            env=command_environment,
            cwd=options.pop("cwd", tmp_path),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            **options,
        )

    return go
