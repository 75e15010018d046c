from __future__ import annotations

import pytest

from cadenza.core.types import Task
from cadenza.tasks.directory import write_task
from cadenza.tasks.generate import GeneratorConfig, draw_tasks
from cadenza.tokens import CompactRenderer, Tokenizer

CORPUS = [
    "def total(values, start=0):\n    result = start\n    for value in values:\n        result += value\n    return result\n",
    "1|def push(self, item):\n2|    self.items.append(item)\nerror: usage: no such file\n",
] * 50


@pytest.fixture(scope="session")
def renderer() -> CompactRenderer:
    return CompactRenderer(Tokenizer.train(CORPUS, 512))


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Real generated tasks with one edit."""
    directory = tmp_path_factory.mktemp("tasks")
    return [write_task(files, directory) for files in draw_tasks(GeneratorConfig(), "demo", 8)]


@pytest.fixture(scope="session")
def hard_tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Two edits in two files."""
    directory = tmp_path_factory.mktemp("hard")
    return [write_task(files, directory) for files in draw_tasks(GeneratorConfig(), "heldout_hard", 4)]
