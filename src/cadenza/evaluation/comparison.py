"""Puts EvalResults of several policies, suites and seeds side by side: one row a policy, one change a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cadenza.core.errors import ConfigError
from cadenza.evaluation.result import EvalResult, TaskFacts
from cadenza.evaluation.statistics import (
    Estimate,
    NonInferiority,
    Outcomes,
    TokensPerSolved,
    estimate,
    non_inferiority,
    paired_change,
    pass_at_k,
    tokens_per_solved,
)

POLICY_ORDER = ("base", "sft", "sft_continued", "rl_sync", "rl")
POLICY_LABELS = {
    "base": "Base",
    "sft": "SFT",
    "sft_continued": "SFT continued",
    "rl_sync": "RL, synchronous",
    "rl": "RL",
    "candidate": "Candidate",
    "serving": "Served",
    "damaged": "Damaged",
}
BEST_OF = 8
PAIRS = (("base", "sft"), ("sft", "rl"), ("sft_continued", "rl"), ("rl_sync", "rl"))
MARGIN = 0.05  # points / 100 that greedy and best-of-8 may lose


@dataclass(frozen=True)
class View:
    """A set of tasks reported as one: results of these suites, tasks that `where` keeps."""

    key: str
    title: str
    suites: tuple[str, ...]
    where: Callable[[TaskFacts], bool]


VIEWS = (
    View("heldout", "Held-out tasks, families seen in training", ("heldout",), lambda f: not f.unseen),
    View("unseen", "Families never trained on", ("heldout", "unseen"), lambda f: f.unseen),
    View("hard", "Hard split: two edits in two files", ("hard", "heldout_hard"), lambda f: True),
)


@dataclass(frozen=True)
class Row:
    """One policy on one view. ``sampled``: pass@1 at ``temperatures``; ``best``: best of ``best_k`` samples."""

    policy: str
    n_tasks: int
    samples: int
    seeds: tuple[int, ...]
    temperatures: tuple[float, ...]
    sampled: Estimate | None
    best: Estimate | None
    best_k: int
    greedy: Estimate | None
    tokens: TokensPerSolved
    invalid_share: float


@dataclass(frozen=True)
class Change:
    """Paired change from policy ``old`` to ``new`` on one view; None where it cannot be computed."""

    old: str
    new: str
    seeds: tuple[int, ...]
    sampled: Estimate | None
    greedy: Estimate | None
    best: Estimate | None
    best_k: int  # the samples of ``best``: as many as the policy with fewer has
    greedy_holds: NonInferiority | None
    best_holds: NonInferiority | None


@dataclass(frozen=True)
class Comparison:
    """All rows and changes of one view."""

    view: View
    rows: tuple[Row, ...]
    changes: tuple[Change, ...]

    @property
    def best_k(self) -> int:
        """The samples of the rows' best-of rates: the most that any policy has, others may have fewer."""
        return max(row.best_k for row in self.rows)

    def best_of(self, row: Row) -> Estimate | None:
        """A row's rate where it is one of ``best_k`` samples; of fewer it would not compare."""
        return row.best if row.best_k == self.best_k else None


def label(policy: str) -> str:
    """Readable name of a policy."""
    return POLICY_LABELS.get(policy, policy)


def ordered(policies: set[str]) -> list[str]:
    """Known policies in the order they are made, then others by name."""
    rank = {name: i for i, name in enumerate(POLICY_ORDER)}
    return sorted(policies, key=lambda p: (rank.get(p, len(rank)), p))


class Results:
    """EvalResults found by policy, view and decoding. Of two for the same slot, the later one counts."""

    def __init__(self, results: Sequence[EvalResult]) -> None:
        self._by_slot: dict[tuple[str, str, bool, int], EvalResult] = {}
        for r in sorted(results, key=lambda r: r.started_at):
            self._by_slot[(r.policy, r.suite, r.temperature == 0.0, r.seed)] = r

    def policies(self, view: View) -> list[str]:
        """Policies with at least one task in the view."""
        return ordered({r.policy for r in self._of(view)})

    def by_seed(self, view: View, policy: str, *, greedy: bool) -> dict[int, Outcomes]:
        """Outcomes of each seed; tasks of several suites of a view are joined."""
        found: dict[int, Outcomes] = {}
        for r in self._of(view):
            if r.policy == policy and (r.temperature == 0.0) == greedy:
                one = r.outcomes(view.where)
                found[r.seed] = _join(found[r.seed], one) if r.seed in found else one
        return dict(sorted(found.items()))

    def temperatures(self, view: View, policy: str) -> tuple[float, ...]:
        """Sampling temperatures used, by seed, each named once."""
        found = [r.temperature for r in self._of(view) if r.policy == policy and r.temperature > 0]
        return tuple(dict.fromkeys(found))

    def common_seeds(self, view: View, new: str, old: str, *, greedy: bool = False) -> list[int]:
        """Seeds for which both policies have results on the view."""
        a, b = self.by_seed(view, new, greedy=greedy), self.by_seed(view, old, greedy=greedy)
        return [seed for seed in a if seed in b]

    def change(self, view: View, new: str, old: str, *, k: int = 1, greedy: bool = False) -> Estimate | None:
        """Paired change of pass@k over the seeds that both policies have; None without a common one, or where no
        task has k samples. Raises ConfigError when the two were not measured on the same tasks in one harness."""
        a, b = self.by_seed(view, new, greedy=greedy), self.by_seed(view, old, greedy=greedy)
        seeds = [s for s in a if s in b]
        self._require_comparable(view, new, old, seeds, greedy)
        try:
            return paired_change([a[s] for s in seeds], [b[s] for s in seeds], k=k)
        except ValueError:  # no common seed, or too few samples for k
            return None

    def _require_comparable(self, view: View, new: str, old: str, seeds: Sequence[int], greedy: bool) -> None:
        """The harness must be one over all seeds, since they are pooled; tasks may differ from seed to seed."""
        found = [r for r in self._of(view) if (r.temperature == 0.0) == greedy and r.seed in seeds]
        theirs = {p: [r for r in found if r.policy == p] for p in (new, old)}
        if len({r.harness_digest for side in theirs.values() for r in side}) > 1:
            raise _not_comparable(new, old, "in different harnesses (agent loop, tools or limits)")
        for seed in seeds:
            suites, tasks = (
                [sorted(what(r) for r in side if r.seed == seed) for side in theirs.values()]
                for what in (lambda r: (r.suite, r.suite_digest), lambda r: (r.suite, sorted(r.tasks)))
            )
            if suites[0] != suites[1] or tasks[0] != tasks[1]:
                raise _not_comparable(new, old, f"on different tasks (seed {seed}, view {view.key!r})")

    def _of(self, view: View) -> list[EvalResult]:
        return [
            r
            for r in self._by_slot.values()
            if r.suite in view.suites and any(map(view.where, r.tasks.values()))
        ]


def compare(results: Sequence[EvalResult], pairs: Sequence[tuple[str, str]] = PAIRS) -> list[Comparison]:
    """One Comparison a view that has results, with the changes of `pairs` (old, new) where both are there.

    Raises ConfigError when a pair was not measured on the same tasks in one harness.
    """
    found = Results(results)
    comparisons = []
    for view in VIEWS:
        policies = found.policies(view)
        if not policies:
            continue
        changes = [_change(found, view, old, new) for old, new in pairs if {old, new} <= set(policies)]
        rows = [_row(found, view, policy) for policy in policies]
        comparisons.append(Comparison(view, tuple(rows), tuple(changes)))
    return comparisons


def _not_comparable(new: str, old: str, how: str) -> ConfigError:
    return ConfigError(
        f"results of {new!r} and {old!r} do not compare: they were measured {how}",
        "evaluate both again with one version and one set of tasks",
    )


def _row(found: Results, view: View, policy: str) -> Row:
    sampled = found.by_seed(view, policy, greedy=False)
    greedy = found.by_seed(view, policy, greedy=True)
    some = list((sampled or greedy).values())
    samples = min(o.solved_NS.shape[1] for o in some)
    k = min(BEST_OF, samples)
    return Row(
        policy=policy,
        n_tasks=len({t for o in some for t in o.task_ids}),
        samples=samples,
        seeds=tuple(sampled or greedy),
        temperatures=found.temperatures(view, policy),
        sampled=_rate(sampled, 1),
        best=_rate(sampled, k) if k > 1 else None,
        best_k=k,
        greedy=_rate(greedy, 1),
        tokens=tokens_per_solved(_stack(some)),
        invalid_share=_stack(some).invalid_share,
    )


def _change(found: Results, view: View, old: str, new: str) -> Change:
    a, b = found.by_seed(view, new, greedy=False), found.by_seed(view, old, greedy=False)
    k = min([BEST_OF, *(o.solved_NS.shape[1] for o in [*a.values(), *b.values()])])
    greedy = found.change(view, new, old, greedy=True)
    best = found.change(view, new, old, k=k) if k > 1 else None
    return Change(
        old=old,
        new=new,
        seeds=tuple(s for s in a if s in b),
        sampled=found.change(view, new, old),
        greedy=greedy,
        best=best,
        best_k=k,
        greedy_holds=non_inferiority(greedy, MARGIN) if greedy else None,
        best_holds=non_inferiority(best, MARGIN) if best else None,
    )


def _rate(by_seed: dict[int, Outcomes], k: int) -> Estimate | None:
    try:
        return estimate([pass_at_k(o, k) for o in by_seed.values()])
    except ValueError:  # no result, or no task with k verdicts
        return None


def _join(one: Outcomes, more: Outcomes) -> Outcomes:
    """Rows of both, cut to the samples both have; a task in both counts once."""
    samples = min(one.solved_NS.shape[1], more.solved_NS.shape[1])
    new = [i for i, t in enumerate(more.task_ids) if t not in set(one.task_ids)]
    return Outcomes(
        (*one.task_ids, *(more.task_ids[i] for i in new)),
        np.vstack([one.solved_NS[:, :samples], more.solved_NS[new, :samples]]),
        np.vstack([one.tokens_NS[:, :samples], more.tokens_NS[new, :samples]]),
    )


def _stack(parts: Sequence[Outcomes]) -> Outcomes:
    """All seeds as one matrix, for counts that need no pairing."""
    samples = min(o.solved_NS.shape[1] for o in parts)
    return Outcomes(
        tuple(f"{i}/{t}" for i, o in enumerate(parts) for t in o.task_ids),
        np.vstack([o.solved_NS[:, :samples] for o in parts]),
        np.vstack([o.tokens_NS[:, :samples] for o in parts]),
    )
