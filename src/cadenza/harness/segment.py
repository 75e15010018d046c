"""Builds a Segment whose invariants hold by construction (invariant 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cadenza.core.types import UNREAD, Segment
from cadenza.tokens import Sampled

_LEAST_LOGPROB = -1e30  # below it float32 turns a finite float into -inf


class SegmentBuilder:
    """Grows one context. Every id is added once, with its kind; a sampled one also with log-prob and version."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._sampled: list[bool] = []
        self._kinds: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.weights: dict[int, str] = {}  # version -> digest
        self._routes: list[np.ndarray] = []
        self.turns: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._ids)

    def cut(self, start: int, end: int) -> list[int]:
        """Ids of a part, to be carried over into another context."""
        return self._ids[start:end]

    def add_given(self, ids: Sequence[int], kinds: Sequence[int]) -> None:
        """Adds ids the model did not sample: the prompt, a tool's result."""
        self._ids += ids
        self._kinds += kinds
        self._sampled += [False] * len(ids)

    def add_sampled(self, sampled: Sampled, kinds: Sequence[int]) -> bool:
        """Adds one sampled turn. A turn whose log-probs or versions do not fit its ids is kept in the context and
        masked (``sampled`` False), never padded; then the answer is False."""
        count = len(sampled.ids)
        aligned = len(sampled.logprobs) == len(sampled.versions) == count and all(
            math.isfinite(logprob) and logprob > _LEAST_LOGPROB for logprob in sampled.logprobs
        )
        start = len(self._ids)
        self._ids += sampled.ids
        self._kinds += kinds
        self._sampled += [aligned] * count
        self.turns.append((start, start + count))
        if sampled.routes_TLJ is not None:
            self._routes.append(sampled.routes_TLJ)
        if aligned:
            self._logprobs += sampled.logprobs
            self._versions += sampled.versions
            self.weights |= sampled.weights
        return aligned

    def _all_routes(self) -> np.ndarray | None:
        """One entry an id; UNREAD for those that the engine never read: the last one sampled and what came after it."""
        if not self._routes:
            return None
        found = np.concatenate(self._routes)
        missing = len(self._ids) - len(found)
        if missing < 0:
            return None  # of more tokens than the context has: of another context
        return np.concatenate((found, np.full((missing, *found.shape[1:]), UNREAD, np.uint8)))

    def build(
        self,
        *,
        finish_reason: str,
        sampling: dict[str, float],
        digests: dict[str, str],
        kind: str = "act",
        parent: int | None = None,
    ) -> list[Segment]:
        """The segment as a list of one, or of none when nothing was ever sampled (a prompt over the limit)."""
        if not self.turns:
            return []
        segment = Segment(
            kind=kind,
            ids_T=np.asarray(self._ids, np.int32),
            sampled_T=np.asarray(self._sampled, np.bool_),
            token_kind_T=np.asarray(self._kinds, np.int8),
            logprob_S=np.asarray(self._logprobs, np.float32),
            version_S=np.asarray(self._versions, np.int32),
            turns=list(self.turns),
            finish_reason=finish_reason,
            sampling=sampling,
            digests=digests,
            parent=parent,
            routes_TLK=self._all_routes(),
        )
        broken = segment.broken()
        assert broken is None, broken
        return [segment]
