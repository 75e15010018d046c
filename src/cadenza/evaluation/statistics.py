"""Estimators over per-task outcomes and their intervals.

Letters: N tasks, S samples a task, K seeds, B bootstrap draws.

An outcome is 1 (solved), 0 (not solved) or NaN (a typed failure of the infrastructure: no verdict). NaN is
left out of a task's mean and counted; it never becomes 0. `require_valid` refuses a result with too many.

The task is the unit of sampling everywhere: S samples of one task say little about the next task, so
intervals resample tasks with all their samples and all their seeds. docs/explanation/evaluation.md derives
each estimator.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cadenza.core.errors import CadenzaError

DRAWS = 10_000  # of the bootstrap: Monte Carlo error of a 95% bound is below 0.1 points at 200 tasks
LEVEL = 0.95
VALID_FLOOR = 0.98  # share of rollouts that need a verdict before a rate may be reported
_CHUNK_CELLS = 4_000_000  # of a (B, N) count matrix held as floats at once: 32 MB


class TooManyInvalid(CadenzaError):
    """A result with too few verdicts to be worth a rate."""

    exit_code = 9


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What one policy did on a list of tasks.

    Shapes: ``solved_NS`` float64 of {0, 1, NaN}; ``tokens_NS`` float64, tokens the policy sampled, NaN where
    no rollout was recorded. Raises ValueError when shapes, ids or values do not fit.
    """

    task_ids: tuple[str, ...]
    solved_NS: np.ndarray
    tokens_NS: np.ndarray

    def __post_init__(self) -> None:
        if self.solved_NS.ndim != 2 or self.solved_NS.shape != self.tokens_NS.shape:
            raise ValueError("solved_NS and tokens_NS must be matrices of the same shape")
        if len(self.task_ids) != len(self.solved_NS) or len(set(self.task_ids)) != len(self.task_ids):
            raise ValueError("task_ids must name each row of solved_NS once")
        seen = self.solved_NS[np.isfinite(self.solved_NS)]
        if np.isinf(self.solved_NS).any() or not np.isin(seen, (0.0, 1.0)).all():
            raise ValueError("an outcome is 0, 1 or NaN")

    @property
    def invalid_share(self) -> float:
        """Share of rollouts without a verdict; 0.0 for an empty matrix."""
        return float(np.isnan(self.solved_NS).mean()) if self.solved_NS.size else 0.0


@dataclass(frozen=True)
class TaskValues:
    """One number per task (N) and the range it can take; NaN where the task has too few valid samples."""

    task_ids: tuple[str, ...]
    values_N: np.ndarray
    span: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks (and seeds) with a percentile interval.

    ``n_tasks`` counts distinct tasks that entered, ``excluded`` task-and-seed cells left out for want of
    valid samples, ``per_seed`` the estimate of each seed alone, in the order given.
    """

    value: float
    low: float
    high: float
    level: float
    n_tasks: int
    excluded: int
    per_seed: tuple[float, ...]

    def points(self) -> tuple[float, float, float]:
        """(value, low, high) in percentage points."""
        return 100 * self.value, 100 * self.low, 100 * self.high


@dataclass(frozen=True)
class TokensPerSolved:
    """Cost of success. ``mean`` and ``median``: sampled tokens of the solved rollouts. ``spent``: tokens of
    *all* valid rollouts divided by the number solved, so that failures are paid for. None: nothing solved."""

    solved: int
    mean: float | None
    median: float | None
    spent: float | None


@dataclass(frozen=True)
class NonInferiority:
    """``holds`` iff the lower end of the change's interval lies above ``-margin`` (unit of the estimate)."""

    margin: float
    low: float
    holds: bool


def require_valid(outcomes: Outcomes, floor: float = VALID_FLOOR, what: str = "the evaluation") -> None:
    """Raises TooManyInvalid when fewer than `floor` of the rollouts have a verdict."""
    if outcomes.solved_NS.size == 0:
        raise TooManyInvalid(f"{what} has no rollouts", "give it tasks and samples")
    share = outcomes.invalid_share
    if 1.0 - share < floor:
        raise TooManyInvalid(
            f"{what}: {share:.1%} of the rollouts ended without a verdict, at most {1 - floor:.1%} may",
            "see the failure kinds in its records, mend the infrastructure and evaluate again",
        )


def pass_at_k(outcomes: Outcomes, k: int = 1) -> TaskValues:
    """Per task, the chance that at least one of k samples solves it; for k = n this is best-of-n.

    Unbiased from n >= k valid samples of which c solved: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021,
    arXiv:2107.03374, section 2.1), as a product so that nothing overflows. NaN where n < k.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    n_N = np.isfinite(outcomes.solved_NS).sum(axis=1).astype(float)
    missed_N = n_N - np.nansum(outcomes.solved_NS, axis=1)
    all_missed_N = np.ones(len(n_N))
    for j in range(k):
        all_missed_N *= np.clip(missed_N - j, 0, None) / np.clip(n_N - j, 1, None)
    return TaskValues(outcomes.task_ids, np.where(n_N >= k, 1.0 - all_missed_N, np.nan))


def tokens_per_solved(outcomes: Outcomes) -> TokensPerSolved:
    """Tokens of solved rollouts, mean and median, and tokens spent per solve over all valid rollouts."""
    solved = outcomes.solved_NS == 1.0
    count = int(solved.sum())
    if count == 0:
        return TokensPerSolved(0, None, None, None)
    tokens = outcomes.tokens_NS[solved]
    spent = float(np.nansum(outcomes.tokens_NS[np.isfinite(outcomes.solved_NS)])) / count
    return TokensPerSolved(count, float(tokens.mean()), float(np.median(tokens)), spent)


def difference(new: TaskValues, old: TaskValues) -> TaskValues:
    """Per task, new minus old. Raises ValueError unless both hold the same tasks: a paired comparison has no
    other meaning. A task without a value on either side gets NaN and is counted as excluded."""
    if set(new.task_ids) != set(old.task_ids):
        raise ValueError("a paired difference needs the same tasks on both sides")
    row = {task: i for i, task in enumerate(old.task_ids)}
    order = [row[task] for task in new.task_ids]
    span = (new.span[0] - old.span[1], new.span[1] - old.span[0])
    return TaskValues(new.task_ids, new.values_N - old.values_N[order], span)


def estimate(
    by_seed: Sequence[TaskValues], *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Estimate:
    """Pools per-task values over seeds: the mean over tasks within each seed, then the plain mean over seeds.

    Interval: percentile bootstrap in which a task is a cluster. Seeds that share tasks form one stratum: a
    draw resamples its tasks once and applies the same draw to each of its seeds, so what a task has in common
    over seeds stays in. Seeds with tasks of their own are strata of their own. Seeds are not resampled: the
    interval speaks of *these* trained policies on new tasks of the same kind, and `per_seed` shows how far
    the policies differ.

    A sample without any spread (all tasks 0, say) has no bootstrap spread either; its interval is widened
    by the exact bound of `least_shown` instead of pretending to certainty.

    Raises ValueError when some seed has no task with a value.
    """
    if not by_seed:
        raise ValueError("an estimate needs at least one seed")
    values_KN = _align(by_seed)
    present_KN = np.isfinite(values_KN)
    if not present_KN.any(axis=1).all():
        raise ValueError("a seed has no task with a value")
    per_seed = np.nanmean(values_KN, axis=1)
    used_N = present_KN.any(axis=0)
    offered = sum(len(v.task_ids) for v in by_seed)
    span = (min(v.span[0] for v in by_seed), max(v.span[1] for v in by_seed))
    low, high = _interval(values_KN[:, used_N], span, level, draws, seed)
    return Estimate(
        value=float(per_seed.mean()), low=low, high=high, level=level,
        n_tasks=int(used_N.sum()), excluded=offered - int(present_KN.sum()),
        per_seed=tuple(float(v) for v in per_seed),
    )  # fmt: skip


def paired_change(
    new: Sequence[Outcomes], old: Sequence[Outcomes], *, k: int = 1, level: float = LEVEL,
    draws: int = DRAWS, seed: int = 0,
) -> Estimate:  # fmt: skip
    """Change of pass@k from `old` to `new`, paired by task and seed: one Outcomes per seed, in one order."""
    if len(new) != len(old):
        raise ValueError("both policies need one result per seed")
    pairs = [difference(pass_at_k(n, k), pass_at_k(o, k)) for n, o in zip(new, old, strict=True)]
    return estimate(pairs, level=level, draws=draws, seed=seed)


def saved_shares(
    before: Sequence[Outcomes], after: Sequence[Outcomes], groups: Mapping[str, Sequence[Collection[str]]], *,
    level: float = LEVEL, draws: int = DRAWS, seed: int = 0,
) -> dict[str, Estimate]:  # fmt: skip
    """By how large a share of its tokens each group of tasks became shorter, pooled over seeds, and "A-B" for every
    two groups: by how much more A did than B, on the same bootstrap draws of tasks.

    Of a seed: 1 - (sum of a group's mean tokens after) / (sum before). A mean of the tasks' own shares would be biased
    by the noise of each task's denominator, and more so where lengths vary more. Only rollouts with a verdict count,
    and tasks that have some on both sides.

    Args:
        before, after: one of each a seed, in one order, of the same tasks.
        groups: by name, the task ids of each seed.

    Raises ValueError when the tasks differ, or a group has none in some seed.
    """
    old, new = ([_mean_tokens(o) for o in side] for side in (before, after))
    if any(set(o.task_ids) != set(n.task_ids) for o, n in zip(old, new, strict=True)):
        raise ValueError("a paired comparison needs the same tasks on both sides")
    task_ids = list(dict.fromkeys(t for o in old for t in o.task_ids))
    old_KN, new_KN = (_align(side, task_ids) for side in (old, new))
    usable_KN = np.isfinite(old_KN) & np.isfinite(new_KN)
    counts_BN = _counts(len(task_ids), draws, seed, 0).astype(float)
    saved: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # per seed, per draw
    kept: dict[str, np.ndarray] = {}
    for name, members in groups.items():
        kept_KN = kept[name] = usable_KN & np.array([[t in chosen for t in task_ids] for chosen in members])
        if not kept_KN.any(axis=1).all():
            raise ValueError(f"group {name!r} has no task with tokens in some seed")
        old_K, new_K = (np.where(kept_KN, side, 0.0).T for side in (old_KN, new_KN))
        with np.errstate(invalid="ignore", divide="ignore"):
            drawn_B = (1.0 - (counts_BN @ new_K) / (counts_BN @ old_K)).mean(axis=1)
        saved[name] = 1.0 - new_K.sum(axis=0) / old_K.sum(axis=0), drawn_B
    for a, b in itertools.combinations(groups, 2):
        saved[f"{a}-{b}"] = saved[a][0] - saved[b][0], saved[a][1] - saved[b][1]
        kept[f"{a}-{b}"] = kept[a] | kept[b]
    found = {}
    for name, (per_seed, drawn_B) in saved.items():
        low, high = np.nanquantile(drawn_B, [(1 - level) / 2, (1 + level) / 2])
        found[name] = Estimate(
            value=float(per_seed.mean()), low=float(low), high=float(high), level=level,
            n_tasks=int(kept[name].any(axis=0).sum()), excluded=int((~usable_KN).sum()),
            per_seed=tuple(float(v) for v in per_seed),
        )  # fmt: skip
    return found


def _mean_tokens(outcomes: Outcomes) -> TaskValues:
    """Per task, the mean of its rollouts with a verdict; NaN where there is none."""
    valid_NS = np.isfinite(outcomes.solved_NS)
    count_N = valid_NS.sum(axis=1)
    total_N = np.where(valid_NS, outcomes.tokens_NS, 0.0).sum(axis=1)
    return TaskValues(
        outcomes.task_ids, np.where(count_N > 0, total_N / np.maximum(count_N, 1), np.nan), (0.0, np.inf)
    )


def non_inferiority(change: Estimate, margin: float) -> NonInferiority:
    """Tests a change against a loss of `margin` (>= 0, same unit: 0.05 is five points).

    The bound is the lower end of the two-sided interval, i.e. one-sided at (1 + level) / 2: the stricter one.
    """
    if margin < 0:
        raise ValueError(f"a margin is not negative, got {margin}")
    return NonInferiority(margin, change.low, change.low > -margin)


def least_shown(n_tasks: int, level: float = LEVEL) -> float:
    """The half width (unit of the estimate) of the interval of ``n_tasks`` equal values: 1 - (alpha/2)^(1/N), the exact
    bound. A paired change of nothing on so few tasks leaves a loss of this size open."""
    return 1.0 - ((1.0 - level) / 2) ** (1.0 / n_tasks)


def tasks_for(margin: float, level: float = LEVEL) -> int:
    """The fewest tasks on which equal outcomes show `non_inferiority` at ``margin``, i.e. `least_shown` is below it.
    Raises ValueError for a margin of 0 or less: no number of tasks is enough."""
    if margin <= 0:
        raise ValueError(f"no number of tasks shows a loss below {margin}")
    enough = 1
    if margin < 1:
        enough = max(1, math.floor(math.log((1.0 - level) / 2) / math.log1p(-margin)))
    while least_shown(enough, level) >= margin:  # the logarithm is rounded
        enough += 1
    return enough


def _align(by_seed: Sequence[TaskValues], task_ids: Sequence[str] = ()) -> np.ndarray:
    """(K, N) over ``task_ids``, by default the union of tasks, NaN where a seed lacks the task or its value."""
    found = task_ids or dict.fromkeys(t for v in by_seed for t in v.task_ids)
    columns = {task: i for i, task in enumerate(found)}
    values_KN = np.full((len(by_seed), len(columns)), np.nan)
    for k, one in enumerate(by_seed):
        values_KN[k, [columns[t] for t in one.task_ids]] = one.values_N
    return values_KN


def _strata(present_KN: np.ndarray) -> list[np.ndarray]:
    """Groups seeds that share a task, directly or through others; returns each group's task columns."""
    groups: list[np.ndarray] = []  # boolean masks over N, disjoint
    for row_N in present_KN:
        touching = [g for g in groups if (g & row_N).any()]
        groups = [g for g in groups if not (g & row_N).any()]
        groups.append(np.logical_or.reduce([row_N, *touching]))
    return [np.flatnonzero(g) for g in groups]


@functools.lru_cache(maxsize=8)
def _counts(n: int, draws: int, seed: int, stratum: int) -> np.ndarray:
    """(B, n) uint16: how often each of n tasks is drawn. Kept, because one report asks for the same dozens of
    times; at 200 tasks it takes 4 MB."""
    rng = np.random.default_rng((seed, stratum, n))
    return rng.multinomial(n, np.full(n, 1.0 / n), size=draws).astype(np.uint16)


def _bootstrap_means(values_KN: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """(B,) pooled means; NaN in the rare draw that leaves a seed without any task."""
    present_KN = np.isfinite(values_KN)
    filled_KN = np.where(present_KN, values_KN, 0.0)
    sums_BK = np.zeros((draws, len(values_KN)))
    counts_BK = np.zeros((draws, len(values_KN)))
    for stratum, columns in enumerate(_strata(present_KN)):
        counts_BN = _counts(len(columns), draws, seed, stratum)
        step = max(1, _CHUNK_CELLS // len(columns))
        for start in range(0, draws, step):
            rows = slice(start, min(start + step, draws))
            times_BN = counts_BN[rows].astype(float)
            sums_BK[rows] += times_BN @ filled_KN[:, columns].T
            counts_BK[rows] += times_BN @ present_KN[:, columns].T
    with np.errstate(invalid="ignore"):
        return (sums_BK / counts_BK).mean(axis=1)


def _interval(
    values_KN: np.ndarray, span: tuple[float, float], level: float, draws: int, seed: int
) -> tuple[float, float]:
    alpha = 1.0 - level
    means_B = _bootstrap_means(values_KN, draws, seed)
    low, high = (float(q) for q in np.nanquantile(means_B, [alpha / 2, 1 - alpha / 2]))
    if np.nanmax(means_B) - np.nanmin(means_B) < 1e-12:
        slack = least_shown(values_KN.shape[1], level)
        low, high = max(span[0], low - slack), min(span[1], high + slack)
    return low, high
