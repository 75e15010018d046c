"""What a step's rollouts were like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cadenza.core.types import Rollout
from cadenza.rewards import summary_of

WATCHED = (
    ("broken_calls", "broken"), ("open_todos", "open_todos"), ("needless_reruns", "needless_reruns"),
    ("broken_summaries", "broken_summaries"),
)  # fmt: skip


def group_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Counts of the rollouts of a step, and means over those with a reward: reward, what each price took of it
    (``reward_NAME``), solved, tokens, turns, version spread, and behaviours, watched whether a reward prices them
    or not. Without any the means are left out."""
    rollouts = [r for group in groups for r in group]
    scored = [r for r in rollouts if r.reward is not None]
    solved = [float(r.verdict.score == 1.0) for r in scored]
    spans = [
        len(np.unique(np.concatenate([s.version_S for s in r.segments]))) > 1 for r in scored if r.segments
    ]
    finish = Counter(r.segments[-1].finish_reason for r in scored if r.segments)
    prices = sorted({name for r in scored for name in r.rewards} - {"outcome"})
    n = len(scored)
    counts = {"rollouts": float(len(rollouts)), "failed_rollouts": float(len(rollouts) - n)}
    if not n:
        return counts
    return {
        **counts,
        "reward": sum(float(r.reward or 0.0) for r in scored) / n,
        **{f"reward_{name}": sum(r.rewards.get(name, 0.0) for r in scored) / n for name in prices},
        "pass_rate": sum(solved) / n,
        "tokens_per_rollout": sum(r.sampled_tokens for r in scored) / n,
        "context_per_rollout": sum(sum(len(s.ids_T) for s in r.segments) for r in scored) / n,
        "turns": sum(sum(len(s.turns) for s in r.segments) for r in scored) / n,
        "contexts": sum(len(r.segments) for r in scored) / n,
        "spans_versions": sum(spans) / n,
        "finished_itself": finish["finish"] / n,
        **{
            f"{name}_per_rollout": sum(summary_of(r.trace).get(key, 0) for r in scored) / n
            for name, key in WATCHED
        },
    }
