"""Supervised fine-tuning on demonstrations: which tokens count, and when the curve is flat."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from cadenza.core.errors import MissingArtifact
from cadenza.core.types import Rollout
from cadenza.training.config import SftDataConfig

Weighted = tuple[np.ndarray, np.ndarray]  # ids_T, weight_T


def weighted_tokens(rollout: Rollout, config: SftDataConfig, end_id: int) -> list[Weighted]:
    """Each segment's ids with loss weights: 1 on the expert's tokens, less elsewhere. ``end_id``: of ``<|end|>``."""
    mistakes = {e["turn"] for e in rollout.trace if e.get("note") == "mistake"}
    wrong: list[np.ndarray] = []  # ids of the turns that were mistakes
    out: list[Weighted] = []
    before = 0  # turns of the segments before: the trace counts through
    for segment in rollout.segments:
        ids_T = segment.ids_T
        first = segment.turns[0][0] if segment.turns else len(ids_T)
        weight_T = np.where(segment.sampled_T, 1.0, config.context_weight).astype(np.float32)
        for copied in wrong:  # steps of an earlier context may be shown again at the beginning
            for start in _places(ids_T[:first], copied):
                weight_T[start : start + len(copied)] = config.mistake_weight
        for turn, (start, end) in enumerate(segment.turns, before):
            if turn in mistakes:
                weight_T[start:end] = config.mistake_weight
                wrong.append(ids_T[start:end])
        # What follows an end and was not sampled opens a message of somebody else, where it is for the policy to speak:
        # it must never learn to write it. Trained on it even lightly, the model answers its own calls once something
        # unusual happens. In later contexts this holds for the copies of steps and for the summary too.
        weight_T[1:][(ids_T[:-1] == end_id) & ~segment.sampled_T[1:]] = 0.0
        for _, end in segment.turns:  # a turn may be cut before its end
            weight_T[end : end + 1] = 0.0
        before += len(segment.turns)
        out.append((ids_T.astype(np.uint16), weight_T))
    return out


def _places(ids_T: np.ndarray, part_P: np.ndarray) -> list[int]:
    """Where ``part_P`` begins in ``ids_T``."""
    if not 0 < len(part_P) <= len(ids_T):
        return []
    windows_NP = np.lib.stride_tricks.sliding_window_view(ids_T, len(part_P))
    return np.flatnonzero((windows_NP == part_P).all(axis=1)).tolist()


def split_demonstrations(
    rollouts: Sequence[Rollout], config: SftDataConfig, seed: int, end_id: int
) -> tuple[list[Weighted], list[Weighted]]:
    """(training, validation) sequences; a task's runs are all on one side. Raises MissingArtifact as ``held_tasks``."""
    held = held_tasks(rollouts, config, seed)
    train = [s for r in rollouts if r.task_id not in held for s in weighted_tokens(r, config, end_id)]
    validation = [s for r in rollouts if r.task_id in held for s in weighted_tokens(r, config, end_id)]
    return train, validation


def held_tasks(rollouts: Sequence[Rollout], config: SftDataConfig, seed: int) -> set[str]:
    """The tasks that are validated on and never trained on.

    Raises MissingArtifact when one task is all there is: it cannot be on both sides.
    """
    tasks = sorted({r.task_id for r in rollouts})
    if len(tasks) < 2:
        raise MissingArtifact(
            f"demonstrations of {len(tasks)} task are too few to train and validate on",
            "raise the number of tasks of the demonstrations' split",
        )
    random.Random(f"{seed}/sft-split").shuffle(tasks)
    return set(tasks[: min(len(tasks) - 1, max(1, round(len(tasks) * config.validation_share)))])


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
