"""A run of 170 turns and more, in many contexts: what a short one does not show."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from long_task import LIMITS, RECORD, long_task, renderer, run

from cadenza.rollouts.record import from_bytes, to_bytes
from cadenza.tokens import Sampled, Sampling
from cadenza.training.rl import make_batch

pytestmark = pytest.mark.needs_namespaces


@pytest.fixture(scope="module")
def kept():
    return from_bytes(RECORD.read_bytes())


class Again:
    """A session that says what was sampled in a recorded run, whatever it is told."""

    def __init__(self, rollout) -> None:
        self.turns = [
            (s.ids_T[begin:end].tolist(), (np.cumsum(s.sampled_T) - 1)[begin:end], s)
            for s in rollout.segments
            for begin, end in s.turns
        ]

    async def sample(self, new_ids: list[int], sampling: Sampling) -> Sampled:
        ids, at, segment = self.turns.pop(0)
        return Sampled(ids, segment.logprob_S[at].tolist(), segment.version_S[at].tolist(), "stop")

    def renew(self) -> None: ...

    def close(self) -> None: ...


def test_a_long_run_is_not_the_same_when_it_is_run_again(kept, tmp_path):
    session = Again(kept)
    again = asyncio.run(run(long_task(tmp_path), session, renderer()))
    assert not session.turns and again.reward == 1.0
    assert len(again.segments) == len(kept.segments)
    for new, old in zip(again.segments, kept.segments, strict=True):
        assert (new.kind, new.finish_reason, new.parent, new.turns) == (
            old.kind, old.finish_reason, old.parent, old.turns,
        )  # fmt: skip
        for name in ("ids_T", "sampled_T", "token_kind_T", "logprob_S", "version_S"):
            assert np.array_equal(getattr(new, name), getattr(old, name)), name
    assert again.patch == kept.patch and again.verdict.score == kept.verdict.score == 1.0


def test_a_chain_of_contexts_is_rewarded_per_context_or_loses_tokens(kept):
    summaries = [s for s in kept.segments if s.kind == "summary"]
    assert len(summaries) >= 4 and sum(len(s.turns) for s in kept.segments) >= 170
    assert all(len(s.ids_T) <= LIMITS.max_context_tokens and s.broken() is None for s in kept.segments)
    assert [s.parent for s in kept.segments] == [None, *range(len(kept.segments) - 1)]
    lost = from_bytes(to_bytes(kept))
    lost.id, lost.reward = "lost", 0.0
    batch = make_batch([[kept, lost]], mask_overlong=False)
    won = [s for s in batch.samples if s.advantage > 0]
    assert len(won) == len(kept.segments) and len({s.advantage for s in batch.samples}) == 2
    sampled = sum(int(s.sampled_T.sum()) for s in kept.segments)
    assert sum(len(s.logprob_S) for s in won) == sampled
