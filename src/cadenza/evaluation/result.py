"""EvalResult: what one policy did on one list of tasks, rollout by rollout, kept in a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError, model_validator

from cadenza.core.config import StrictConfig
from cadenza.core.errors import CorruptArtifact, MissingArtifact
from cadenza.core.files import disk_errors, write_bytes
from cadenza.core.types import Rollout, Task
from cadenza.evaluation.statistics import Outcomes, estimate, pass_at_k
from cadenza.tasks.bugs import UNSEEN_FAMILIES

FORMAT_VERSION = 1
_RECORD_FIELDS = ("task", "sample", "solved", "failure", "tokens", "turns", "attempts", "contexts", "ended")
_LATER_FIELDS = 2  # the last of them, which older files lack


class TaskFacts(StrictConfig):
    """What a slice may ask of a task. ``unseen``: one of its bug families appears only in held-out."""

    split: str
    family: str  # several planted bugs: different names joined by "+"
    ambiguity: int
    edits: int
    unseen: bool = False


class EvalRecord(StrictConfig):
    """One rollout. ``solved`` None: no verdict, ``failure`` says why. A failure that is the model's own
    (``counts``) has ``solved`` False *and* its kind. ``tokens``: sampled by the policy. ``attempts``: trials
    run for this slot, retries of infrastructure failures included. ``contexts``: windows of the run. ``ended``: what
    ended it (core.types, ``finish_reason``). Both None in a file written before they were kept."""

    task_id: str
    sample: int
    solved: bool | None
    failure: str | None = None
    tokens: int
    turns: int
    attempts: int = 1
    contexts: int | None = None
    ended: str | None = None

    @model_validator(mode="after")
    def _no_silent_loss(self) -> EvalRecord:
        if self.solved is None and self.failure is None:
            raise ValueError("a record without a verdict needs a failure kind")
        return self


class EvalResult(StrictConfig):
    """All rollouts of one policy on one list of tasks at one temperature and seed.

    ``suite_digest`` and ``harness_digest`` pin what was measured; two results compare only if both agree.
    """

    format_version: int = FORMAT_VERSION
    policy: str
    policy_digest: str = ""
    policy_version: int = 0
    suite: str
    suite_digest: str
    harness_digest: str = ""
    temperature: float
    seed: int
    samples: int
    tasks: dict[str, TaskFacts]
    records: tuple[EvalRecord, ...]
    started_at: str = ""  # ISO 8601, UTC
    wall_s: float = 0.0
    machine: dict[str, Any] = {}

    @model_validator(mode="after")
    def _each_slot_once(self) -> EvalResult:
        slots = {(r.task_id, r.sample) for r in self.records}
        if len(slots) != len(self.records):
            raise ValueError("a (task, sample) slot is recorded twice")
        if any(t not in self.tasks or not 0 <= s < self.samples for t, s in slots):
            raise ValueError("a record names an unknown task or sample")
        return self

    def outcomes(self, where: Callable[[TaskFacts], bool] = lambda facts: True) -> Outcomes:
        """Matrices over the tasks that `where` keeps; a slot never recorded is NaN: it has no verdict."""
        chosen = [task for task, facts in self.tasks.items() if where(facts)]
        row = {task: i for i, task in enumerate(chosen)}
        solved_NS = np.full((len(chosen), self.samples), np.nan)
        tokens_NS = np.full((len(chosen), self.samples), np.nan)
        for r in self.records:
            if (i := row.get(r.task_id)) is not None:
                tokens_NS[i, r.sample] = r.tokens
                if r.solved is not None:
                    solved_NS[i, r.sample] = float(r.solved)
        return Outcomes(tuple(chosen), solved_NS, tokens_NS)

    def slices(self, by: str) -> dict[str, Outcomes]:
        """Outcomes by value of one field of TaskFacts: family, ambiguity, edits, unseen or split."""
        groups = sorted({getattr(facts, by) for facts in self.tasks.values()})
        return {str(g): self.outcomes(lambda facts, g=g: getattr(facts, by) == g) for g in groups}

    def failures(self) -> dict[str, int]:
        """How many rollouts ended in each failure kind, the model's own included."""
        counts: dict[str, int] = {}
        for r in self.records:
            if r.failure is not None:
                counts[r.failure] = counts.get(r.failure, 0) + 1
        return dict(sorted(counts.items()))

    def endings(self) -> dict[str, int]:
        """How many rollouts ended by what, the commonest first."""
        return dict(Counter(r.ended for r in self.records if r.ended is not None).most_common())

    def summary(self) -> str:
        """One line for a terminal: pass@1 with its interval, or why there is none."""
        outcomes = self.outcomes()
        text = f"{self.policy} on {self.suite}: {len(self.tasks)} tasks x {self.samples}, t = {self.temperature:g}: "
        try:
            rate = estimate([pass_at_k(outcomes)])
        except ValueError:
            return text + "no rollout has a verdict"
        invalid = f", {outcomes.invalid_share:.1%} without a verdict" if outcomes.invalid_share else ""
        low, high = 100 * rate.low, 100 * rate.high
        return f"{text}pass@1 {100 * rate.value:.1f}% [{low:.1f}, {high:.1f}]{invalid}"

    def save(self, path: Path) -> None:
        """Writes JSON; `path` holds the old file or the whole new one. ResourceExhausted on a full disk."""
        body = self.model_dump(mode="json", exclude={"records"})
        order = {task: i for i, task in enumerate(self.tasks)}
        body["record_fields"] = list(_RECORD_FIELDS)
        body["records"] = [
            [order[r.task_id], *(getattr(r, name) for name in _RECORD_FIELDS[1:])] for r in self.records
        ]
        write_text(path, json.dumps(body, allow_nan=False, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> EvalResult:
        """Raises MissingArtifact, or CorruptArtifact for another format version or broken content."""
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MissingArtifact(f"no evaluation result at {path}", "run `cadenza eval` first") from None
        except (ValueError, OSError) as error:
            raise CorruptArtifact(f"{path} cannot be read: {error}", "evaluate again") from None
        try:
            if (found := body.get("format_version")) != FORMAT_VERSION:
                raise CorruptArtifact(
                    f"{path} has format version {found}, this Cadenza reads {FORMAT_VERSION}",
                    "evaluate again with this version",
                )
            fields = body.pop("record_fields")
            if fields != list(_RECORD_FIELDS[: max(len(fields), len(_RECORD_FIELDS) - _LATER_FIELDS)]):
                raise ValueError("unknown record fields")
            tasks = list(body["tasks"])
            rows = [dict(zip(fields, row, strict=True)) for row in body["records"]]
            body["records"] = [{"task_id": tasks[row.pop("task")], **row} for row in rows]
            return cls.model_validate(body)
        except (ValidationError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            line = str(error).splitlines()[0]
            raise CorruptArtifact(f"{path} is no evaluation result: {line}", "evaluate again") from None


def facts_of(task: Task) -> TaskFacts:
    """Reads the slice fields out of a task's metadata ([metadata] of task.toml)."""
    about = task.metadata
    families: Sequence[str] = about.get("families") or [about.get("family", "unknown")]
    return TaskFacts(
        split=task.split,
        family="+".join(sorted(set(families))),
        ambiguity=task.ambiguity,
        edits=int(about.get("edits", len(families))),
        unseen=any(f in UNSEEN_FAMILIES for f in families),
    )


def record_of(task: Task, sample: int, rollout: Rollout, attempts: int = 1) -> EvalRecord:
    """Solved iff the score is 1 (every expected test passed); the model's own failures are not solved."""
    verdict = rollout.verdict
    if verdict.failure is None:
        solved: bool | None = verdict.score is not None and verdict.score >= 1.0
    else:
        solved = False if verdict.failure.counts else None
    return EvalRecord(
        task_id=task.id, sample=sample, solved=solved,
        failure=verdict.failure.kind if verdict.failure else None,
        tokens=rollout.sampled_tokens, turns=sum(len(s.turns) for s in rollout.segments), attempts=attempts,
        contexts=len(rollout.segments),
        ended=_ended(rollout),
    )  # fmt: skip


def _ended(rollout: Rollout) -> str | None:
    """Of the run, as the trace ends: its last segment may be one that ended with a summary, when no token was left for
    the context after it."""
    last = rollout.trace[-1].get("summary") if rollout.trace else None
    return last.get("finish_reason") if isinstance(last, dict) else None


def write_text(path: Path, text: str) -> None:
    """Writes the whole file or nothing, making its folder. Raises ResourceExhausted on a full disk."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode("utf-8"))
