from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza.core.types import Task
from cadenza.sandbox import LocalBackend
from cadenza.tasks.bugs import DEMO_FAMILIES
from cadenza.tasks.directory import write_task
from cadenza.tasks.generate import GeneratorConfig, SplitConfig, draw_tasks

sys.path.insert(0, str(Path(__file__).parent))  # long_task


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Real generated tasks with one edit."""
    directory = tmp_path_factory.mktemp("tasks")
    return [write_task(files, directory) for files in draw_tasks(GeneratorConfig(), "demo", 6)]


@pytest.fixture(scope="session")
def hard_tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Two edits in two files."""
    directory = tmp_path_factory.mktemp("hard")
    return [write_task(files, directory) for files in draw_tasks(GeneratorConfig(), "heldout_hard", 3)]


@pytest.fixture(scope="session")
def reported_tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Three bugs that only a list of reports tells of."""
    config = GeneratorConfig(splits={"val": SplitConfig(count=4, families=DEMO_FAMILIES, reports_share=1.0)})
    directory = tmp_path_factory.mktemp("reported")
    return [write_task(files, directory) for files in draw_tasks(config, "val", 4)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for a module, because a backend belongs to one."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def backend(runner: asyncio.Runner) -> Iterator[LocalBackend]:
    backend = LocalBackend()
    runner.run(backend.start())
    yield backend
    runner.run(backend.aclose())
