"""Stage ``tasks``: generates every split and validates each task by running it in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pydantic import Field

from cadenza.core.errors import CorruptArtifact, SandboxUnavailable
from cadenza.core.types import Task
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.sandbox.local import LocalBackend
from cadenza.tasks.generate import GeneratorConfig, generate_split
from cadenza.tasks.validate import Invalid, validate_tasks

_CHUNK = 200  # tasks between two movements of the progress bar


class TasksConfig(GeneratorConfig):
    """The generator's keys. ``validate_share``: part of each split that is run in a sandbox, gold and null (1.0: every
    task); the generator itself has run every task's calls in a plain process before."""

    validate_share: float = Field(default=1.0, ge=0, le=1)


class Tasks(Stage[TasksConfig]):
    """Artifact: one folder a split, one Harbor task directory a task."""

    Config = TasksConfig

    def run(self, context: StageContext) -> Figures:
        # First: generating a split takes minutes, and a machine without sandboxes would be told only after it.
        found = LocalBackend.probe()
        if not found.available:
            raise SandboxUnavailable(found.reason, found.mend)
        config = self.config.model_copy(
            update={"seed": self.config.seed + context.seed_for("tasks") % 1_000_000}
        )
        figures: Figures = {}
        for split in self.config.splits:
            tasks = generate_split(config, split, context.out / split)
            checked = tasks[: max(1, round(len(tasks) * self.config.validate_share))]
            with context.progress.bar(f"validate {split}", len(checked)) as bar:
                bad: list[Invalid] = []
                for start in range(0, len(checked), _CHUNK):
                    chunk = checked[start : start + _CHUNK]
                    bad += asyncio.run(_validate(chunk))
                    bar.advance(len(chunk))
            if bad:
                raise CorruptArtifact(
                    f"{len(bad)} of {len(checked)} tasks of split {split} fail validation, "
                    f"first {bad[0].task_id}: {bad[0].reason}",
                    "this is a defect of the generator; report it with the recipe's seed",
                )
            figures[split] = len(tasks)
            figures[f"{split}_validated"] = len(checked)
        return figures


async def _validate(tasks: Sequence[Task]) -> list[Invalid]:
    async with LocalBackend() as backend:
        return await validate_tasks(tasks, backend)
