"""Supervised fine-tuning on demonstrations: which tokens count, and when the curve is flat."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from cadenza.core.errors import MissingArtifact
from cadenza.core.types import Rollout
from cadenza.training.config import SftDataConfig

Weighted = tuple[np.ndarray, np.ndarray]  # ids_T, weight_T


def weighted_tokens(rollout: Rollout, config: SftDataConfig) -> list[Weighted]:
    """Each segment's ids with loss weights: 1 on the expert's tokens, less elsewhere."""
    mistakes = {e["turn"] for e in rollout.trace if e.get("note") == "mistake"}
    out: list[Weighted] = []
    before = 0  # turns of the segments before: the trace counts through
    for segment in rollout.segments:
        weight_T = np.where(segment.sampled_T, 1.0, config.context_weight).astype(np.float32)
        for turn, (start, end) in enumerate(segment.turns, before):
            if turn in mistakes:
                weight_T[start:end] = config.mistake_weight
            if end < len(weight_T):
                # The role token that opens the tool's output: the policy must never learn to write it. Trained
                # on it even lightly, the model answers its own calls once something unusual happens.
                weight_T[end] = 0.0
        before += len(segment.turns)
        out.append((segment.ids_T.astype(np.uint16), weight_T))
    return out


def split_demonstrations(
    rollouts: Sequence[Rollout], config: SftDataConfig, seed: int
) -> tuple[list[Weighted], list[Weighted]]:
    """(training, validation) sequences; a task's runs are all on one side.

    Raises MissingArtifact when one task is all there is: it cannot be on both sides.
    """
    tasks = sorted({r.task_id for r in rollouts})
    if len(tasks) < 2:
        raise MissingArtifact(
            f"demonstrations of {len(tasks)} task are too few to train and validate on",
            "raise the number of tasks of the demonstrations' split",
        )
    random.Random(f"{seed}/sft-split").shuffle(tasks)
    held = set(tasks[: min(len(tasks) - 1, max(1, round(len(tasks) * config.validation_share)))])
    train = [s for r in rollouts if r.task_id not in held for s in weighted_tokens(r, config)]
    validation = [s for r in rollouts if r.task_id in held for s in weighted_tokens(r, config)]
    return train, validation


def only_actions(sequences: Sequence[Weighted]) -> list[Weighted]:
    """The same with weight on the expert's own tokens alone: what the validation curve measures."""
    return [(ids, (weight >= 1.0).astype(np.float32)) for ids, weight in sequences]


def epoch_batches(
    sequences: Sequence[Weighted], tokens_per_step: int, seed: int, epoch: int
) -> list[list[int]]:
    """A seeded order of one epoch, cut into steps of about ``tokens_per_step`` tokens: indices into ``sequences``."""
    order = list(range(len(sequences)))
    random.Random(f"{seed}/sft-epoch/{epoch}").shuffle(order)
    steps: list[list[int]] = [[]]
    tokens = 0
    for index in order:
        if tokens >= tokens_per_step:
            steps.append([])
            tokens = 0
        steps[-1].append(index)
        tokens += len(sequences[index][0])
    return steps


class Plateau:
    """Watches a validation loss: flat after ``patience`` evaluations without an improvement of ``tolerance``."""

    def __init__(self, patience: int, tolerance: float) -> None:
        self.patience, self.tolerance = patience, tolerance
        self.best, self.waited = float("inf"), 0

    def observe(self, loss: float) -> bool:
        """Whether ``loss`` is the best so far (by any amount)."""
        better = loss < self.best
        if loss < self.best * (1 - self.tolerance):
            self.waited = 0
        else:
            self.waited += 1
        self.best = min(self.best, loss)
        return better

    @classmethod
    def replay(cls, patience: int, tolerance: float, losses: Sequence[float]) -> Plateau:
        """Where a curve stands after ``losses``: how a resumed run remembers."""
        plateau = cls(patience, tolerance)
        for loss in losses:
            plateau.observe(loss)
        return plateau

    @property
    def flat(self) -> bool:
        return self.waited >= self.patience
