"""Which prompt next: each at most once, more often from where the policy sometimes succeeds.

Tasks fall into strata (bug family, number of edits). A group's signal is the spread of its outcomes: none where all its
rollouts succeed or all fail. A stratum is drawn in proportion to its tasks that are left times the mean signal of its
recent groups, with a floor that keeps every stratum visited. The stratum's pass rate would not do: one in which most
tasks are always solved and some never has a middling rate and no signal. Composer 2 upsamples harder prompts by simple
heuristics (section 4.1); this is one.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.types import Task

_UNKNOWN = 0.25  # the signal of a stratum before its first group: half of the most there can be


class CurriculumConfig(StrictConfig):
    """``adaptive``: off draws uniformly. ``floor``: least signal a stratum is given; signals are the standard deviation
    within a group (0..0.5). ``memory``: weight of the past in the running mean of a stratum's signal (0..1)."""

    adaptive: bool = True
    floor: float = Field(default=0.05, ge=0, le=1)
    memory: float = Field(default=0.9, ge=0, le=1)


def stratum_of(task: Task) -> str:
    """The bug family of a task with one edit; tasks with more edits by their number, since pairs of families are so
    many that each would be tried as if nothing were known of it. Ambiguity is left to chance."""
    families = sorted(str(f) for f in task.metadata.get("families") or [task.metadata.get("family", "?")])
    edits = int(task.metadata.get("edits", len(families)))
    return families[0] if edits == 1 else f"{edits} edits"


class Curriculum:
    """Draws prompts without replacement. All state is in ``signals`` and in what was drawn, so it can be resumed."""

    def __init__(self, tasks: Sequence[Task], seed: int, config: CurriculumConfig) -> None:
        self.config = config
        self.rng = random.Random(f"{seed}/curriculum")
        self.signals: dict[str, float] = {}
        self._queues: dict[str, list[Task]] = defaultdict(list)
        shuffled = sorted(tasks, key=lambda t: t.id)
        self.rng.shuffle(shuffled)
        for task in shuffled:
            self._queues[stratum_of(task)].append(task)

    @property
    def left(self) -> int:
        """Prompts that were not drawn yet."""
        return sum(len(q) for q in self._queues.values())

    def forget(self, task_ids: set[str]) -> None:
        """Removes prompts that a ledger says were planned already."""
        for queue in self._queues.values():
            queue[:] = [t for t in queue if t.id not in task_ids]

    def draw(self) -> Task | None:
        """The next prompt, or None when none is left."""
        strata = [s for s in sorted(self._queues) if self._queues[s]]
        if not strata:
            return None
        weights = [self._weight(s) * len(self._queues[s]) for s in strata]
        return self._queues[self.rng.choices(strata, weights)[0]].pop()

    def observe(self, task: Task, pass_rate: float) -> None:
        """Updates the running signal of the task's stratum with that of its group, which had this pass rate."""
        stratum = stratum_of(task)
        p = min(1.0, max(0.0, pass_rate))
        old = self.signals.get(stratum, _UNKNOWN)
        self.signals[stratum] = self.config.memory * old + (1 - self.config.memory) * (p * (1 - p)) ** 0.5

    def _weight(self, stratum: str) -> float:
        if not self.config.adaptive:
            return 1.0
        return max(self.config.floor, self.signals.get(stratum, _UNKNOWN))
