"""Real Task and Rollout values for the tests of this room, built by hand: no sandbox, no model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cadenza.core.errors import RolloutFailure
from cadenza.core.types import Policy, Rollout, Segment, Task, Verdict

POLICY = Policy("sft", 3, None, "d1")


def task(name: str, split: str = "heldout", **metadata) -> Task:
    about = {"families": ["off_by_one"], "edits": 1, **metadata}
    return Task(name, Path(name), split, 1, "generated", "2026-01-01T00:00:00", about)


def segment(sampled: int, weights: str = "") -> Segment:
    total = sampled + 5
    mask = np.arange(total) >= 5
    return Segment(
        "act", np.arange(total, dtype=np.int32), mask, np.zeros(total, np.int8),
        np.zeros(sampled, np.float32), np.zeros(sampled, np.int32), [(5, total)], "finish", {}, {"weights": weights},
    )  # fmt: skip


def rollout(
    of: Task, seed: int, score: float | None, tokens: int = 7, failure: RolloutFailure | None = None,
    weights: str = "",
) -> Rollout:  # fmt: skip
    verdict = Verdict(score, failure)
    status = "failed" if failure else "finished"
    return Rollout("r", "g", of.id, [segment(tokens, weights)], [], "", verdict, {}, score, status, {}, seed)
