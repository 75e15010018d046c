"""A suite: a list of tasks with everything that could change the score pinned beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.errors import CorruptArtifact
from cadenza.core.types import Task
from cadenza.evaluation.statistics import VALID_FLOOR


class EvalLimits(StrictConfig):
    """Bounds of one evaluation; times in seconds. ``concurrency``: trials at once. ``retries``: extra trials of a slot
    whose failure asks for it. ``grade_deadline_s``: for the tests of one patch where no services run the trials; in a
    recipe ``services.environment.deadlines.grade_s`` says it. ``deadline_s``: of everything. ``valid_floor``: share of
    rollouts that need a verdict (0..1).

    The agent's own limits (turns, tokens, wall time) belong to the harness and are pinned with it.
    """

    concurrency: int = Field(default=64, ge=1, json_schema_extra={"operational": True})
    retries: int = Field(default=2, ge=0, json_schema_extra={"operational": True})
    grade_deadline_s: float = Field(default=20.0, gt=0)
    deadline_s: float = Field(default=3600.0, gt=0, json_schema_extra={"operational": True})
    valid_floor: float = Field(default=VALID_FLOOR, ge=0, le=1)


DEFAULT_LIMITS = EvalLimits()


class SuiteConfig(StrictConfig):
    """What a recipe says about an evaluation. ``temperatures``: the grid searched on the validation split."""

    name: str = "heldout"
    split: str = "heldout"
    samples: int = Field(default=8, ge=1)
    temperatures: tuple[float, ...] = (0.4, 0.7, 1.0)
    seeds: tuple[int, ...] = (0,)
    limits: EvalLimits = DEFAULT_LIMITS


class Suite(StrictConfig):
    """A SuiteConfig bound to tasks and a harness by digest."""

    config: SuiteConfig
    task_ids: tuple[str, ...]
    tasks_digest: str
    harness_digest: str

    def check(self, tasks: Sequence[Task], harness_digest: str) -> None:
        """Raises CorruptArtifact when the tasks or the harness are not the pinned ones."""
        if tasks_digest(tasks) != self.tasks_digest:
            raise CorruptArtifact(
                f"the tasks of suite {self.config.name!r} are not the pinned ones",
                "generate them again with the pinned configuration, or pin a new suite under a new name",
            )
        if harness_digest != self.harness_digest:
            raise CorruptArtifact(
                f"suite {self.config.name!r} was pinned with another harness",
                "pin a new suite and evaluate both policies on it: scores of two harnesses do not compare",
            )


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Hex digest of the set of task ids (content hashes), whatever their order."""
    return hashlib.blake2b("\n".join(sorted(t.id for t in tasks)).encode(), digest_size=16).hexdigest()


def pin(config: SuiteConfig, tasks: Sequence[Task], harness_digest: str) -> Suite:
    """Binds a suite to these tasks and this harness. Raises ValueError for no tasks or one twice."""
    ids = tuple(sorted(t.id for t in tasks))
    if not ids or len(set(ids)) != len(ids):
        raise ValueError("a suite needs tasks, each once")
    return Suite(config=config, task_ids=ids, tasks_digest=tasks_digest(tasks), harness_digest=harness_digest)
