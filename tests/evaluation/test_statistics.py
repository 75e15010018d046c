"""A rate that is wrong is worse than none: estimators against brute force, intervals against known truth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.evaluation.statistics import (
    Outcomes,
    TaskValues,
    TooManyInvalid,
    difference,
    estimate,
    least_shown,
    non_inferiority,
    paired_change,
    pass_at_k,
    require_valid,
    saved_shares,
    tasks_for,
    tokens_per_solved,
)

cell = st.sampled_from([0.0, 1.0, math.nan])
matrices = st.integers(1, 6).flatmap(
    lambda s: st.lists(st.lists(cell, min_size=s, max_size=s), min_size=1, max_size=8)
)


def outcomes(rows, tokens=None) -> Outcomes:
    solved = np.array(rows, dtype=float)
    return Outcomes(
        tuple(f"task{i}" for i in range(len(rows))),
        solved,
        np.full(solved.shape, 10.0) if tokens is None else np.array(tokens, dtype=float),
    )


def values(numbers, names=None) -> TaskValues:
    names = names or [f"task{i}" for i in range(len(numbers))]
    return TaskValues(tuple(names), np.array(numbers, dtype=float))


@given(matrices, st.integers(1, 6))
def test_pass_at_k_equals_the_mean_over_all_subsets_of_k_samples(rows, k):
    got = pass_at_k(outcomes(rows), k).values_N
    for row, value in zip(rows, got, strict=True):
        valid = [x for x in row if not math.isnan(x)]
        if len(valid) < k:
            assert math.isnan(value)
        else:
            picks = [max(p) for p in itertools.combinations(valid, k)]
            assert value == pytest.approx(sum(picks) / len(picks))


@given(matrices)
def test_a_typed_failure_never_counts_as_zero(rows):
    got = pass_at_k(outcomes(rows)).values_N
    for row, value in zip(rows, got, strict=True):
        valid = [x for x in row if not math.isnan(x)]
        assert math.isnan(value) if not valid else value == pytest.approx(sum(valid) / len(valid))


def test_large_n_does_not_overflow_pass_at_k():
    row = [1.0] * 3 + [0.0] * 2997
    exact = 1 - math.comb(2997, 500) / math.comb(3000, 500)
    assert pass_at_k(outcomes([row]), 500).values_N[0] == pytest.approx(exact, rel=1e-9)


def test_too_many_failures_refuse_a_rate_and_say_how_many():
    require_valid(outcomes([[1.0] * 49 + [math.nan]]))
    with pytest.raises(TooManyInvalid, match=r"4\.0%"):
        require_valid(outcomes([[1.0] * 48 + [math.nan] * 2]))
    with pytest.raises(TooManyInvalid):
        require_valid(Outcomes((), np.zeros((0, 4)), np.zeros((0, 4))))


@pytest.mark.parametrize("bad", [[[0.5]], [[math.inf]], [[2.0]]])
def test_an_outcome_that_is_not_a_verdict_is_refused(bad):
    with pytest.raises(ValueError):
        outcomes(bad)


@given(matrices, st.data())
def test_tokens_per_solved_matches_a_plain_loop(rows, data):
    tokens = [[data.draw(st.integers(1, 500)) for _ in row] for row in rows]
    got = tokens_per_solved(outcomes(rows, tokens))
    flat = [(s, t) for r, ts in zip(rows, tokens, strict=True) for s, t in zip(r, ts, strict=True)]
    won = sorted(t for s, t in flat if s == 1.0)
    assert got.solved == len(won)
    if won:
        mid = (won[(len(won) - 1) // 2] + won[len(won) // 2]) / 2
        assert (got.mean, got.median) == (pytest.approx(sum(won) / len(won)), pytest.approx(mid))
        assert got.spent == pytest.approx(sum(t for s, t in flat if not math.isnan(s)) / len(won))
    else:
        assert (got.mean, got.median, got.spent) == (None, None, None)


def test_a_paired_difference_follows_the_task_and_not_the_row():
    new, old = values([1.0, 0.0], ["a", "b"]), values([0.25, 0.5], ["b", "a"])
    assert difference(new, old).values_N.tolist() == [0.5, -0.25]
    with pytest.raises(ValueError, match="same tasks"):
        difference(new, values([0.0, 0.0], ["a", "c"]))


def test_same_seed_same_interval_and_the_value_lies_inside():
    v = values(np.random.default_rng(3).random(50))
    first, again = estimate([v], seed=7), estimate([v], seed=7)
    assert first == again
    assert first.low < first.value < first.high
    assert estimate([v], seed=8).low != first.low


def test_interval_equals_the_standard_error_of_the_task_mean():
    v = values(np.random.default_rng(0).random(400))
    got = estimate([v], draws=4000)
    half = 1.96 * v.values_N.std() / 20
    assert (got.high - got.low) / 2 == pytest.approx(half, rel=0.05)


def test_more_samples_of_the_same_tasks_do_not_narrow_the_interval_like_more_tasks():
    rows = [[float(i % 2)] * 8 for i in range(40)]
    wide = estimate([pass_at_k(outcomes(rows))])
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(40), rel=0.1)


def test_seeds_that_share_tasks_keep_the_correlation_of_a_task():
    """Three identical seeds hold no more information than one; independent task sets do."""
    rng = np.random.default_rng(1)
    v = values(rng.random(100))
    one, same = estimate([v]), estimate([v, v, v])
    assert same.high - same.low == pytest.approx(one.high - one.low, rel=0.1)
    apart = estimate([values(v.values_N, [f"{s}-{i}" for i in range(100)]) for s in "xyz"])
    assert apart.high - apart.low == pytest.approx((one.high - one.low) / math.sqrt(3), rel=0.1)


def test_seeds_weigh_the_same_whatever_their_number_of_tasks():
    got = estimate([values([1.0] * 10), values([0.0] * 4, [f"other{i}" for i in range(4)])])
    assert got.value == pytest.approx(0.5)
    assert got.per_seed == (1.0, 0.0)


def test_a_task_missing_in_one_seed_is_counted_and_does_not_drop_the_task():
    got = estimate([values([1.0, math.nan, 0.0]), values([1.0, 1.0, 0.0])])
    assert (got.n_tasks, got.excluded) == (3, 1)
    assert got.per_seed == (pytest.approx(0.5), pytest.approx(2 / 3))


def test_nothing_solved_is_not_reported_as_certainly_zero():
    got = estimate([values([0.0] * 200)])
    assert (got.value, got.low) == (0.0, 0.0)
    assert got.high == pytest.approx(1 - 0.025 ** (1 / 200))
    flat = estimate([difference(values([0.0] * 200), values([0.0] * 200))])
    assert flat.low == -flat.high < 0


def test_a_seed_without_values_is_an_error_and_not_a_nan():
    with pytest.raises(ValueError, match="no task with a value"):
        estimate([values([math.nan])])
    with pytest.raises(ValueError):
        estimate([])


@pytest.mark.parametrize("margin", [0.01, 0.05, 0.1, 0.25, 0.4, 0.99, 1.0, 1.5])
def test_the_number_of_tasks_that_is_told_is_not_enough_or_too_many(margin):
    def change(n):
        same = Outcomes(tuple(map(str, range(n))), np.ones((n, 2)), np.ones((n, 2)))
        return paired_change([same], [same])

    enough = tasks_for(margin)
    assert non_inferiority(change(enough), margin).holds and change(enough).low == -least_shown(enough)
    assert enough == 1 or not non_inferiority(change(enough - 1), margin).holds
    with pytest.raises(ValueError, match="no number of tasks"):
        tasks_for(0.0)


def test_non_inferiority_reads_the_lower_bound():
    base = np.zeros((100, 8))
    base[:50] = 1
    worse = base.copy()
    worse[:8] = 0
    old, new = outcomes(base.tolist()), outcomes(worse.tolist())
    change = paired_change([new], [old])
    assert change.value == pytest.approx(-0.08)
    assert not non_inferiority(change, 0.05).holds
    assert non_inferiority(paired_change([old], [old]), 0.05).holds
    with pytest.raises(ValueError):
        non_inferiority(change, -0.1)


@settings(max_examples=30, deadline=None)
@given(matrices)
def test_an_estimate_is_finite_and_ordered_for_any_outcomes(rows):
    v = pass_at_k(outcomes(rows))
    if not np.isfinite(v.values_N).any():
        return
    got = estimate([v], draws=200)
    assert 0 <= got.low <= got.high <= 1
    assert got.low - 1e-9 <= got.value <= got.high + 1e-9 or len(rows) < 4


def test_interval_covers_the_true_change_about_as_often_as_it_says():
    """300 simulated comparisons of two policies, 60 tasks x 4 samples x 2 seeds sharing the tasks."""
    rng = np.random.default_rng(11)
    hits = 0
    for trial in range(300):
        p = rng.beta(0.6, 0.8, size=60)
        gain = rng.normal(0.10, 0.10, size=60)
        better = np.clip(p + gain, 0, 1)
        truth = _TRUE_GAIN
        new = [outcomes((rng.random((60, 4)) < better[:, None]).astype(float)) for _ in range(2)]
        old = [outcomes((rng.random((60, 4)) < p[:, None]).astype(float)) for _ in range(2)]
        got = paired_change(new, old, draws=400, seed=trial)
        hits += got.low <= truth <= got.high
    assert 0.91 <= hits / 300 <= 0.98


def _true_gain() -> float:
    rng = np.random.default_rng(12)
    p = rng.beta(0.6, 0.8, size=1_000_000)
    return float((np.clip(p + rng.normal(0.10, 0.10, size=p.size), 0, 1) - p).mean())


_TRUE_GAIN = _true_gain()


def outcomes_of(tokens_NS: np.ndarray, lost: bool = False) -> Outcomes:
    solved_NS = np.ones_like(tokens_NS)
    if lost:  # a rollout that was lost is recorded with no tokens
        solved_NS[:, 0], tokens_NS = np.nan, tokens_NS * (np.arange(tokens_NS.shape[1]) > 0)
    return Outcomes(tuple(f"t{i}" for i in range(len(tokens_NS))), solved_NS, tokens_NS)


def test_noise_alone_makes_the_group_with_more_of_it_shorter_or_longer():
    """A mean of the tasks' own shares would say that a group of strongly varying length grew by a sixth."""
    rng = np.random.default_rng(0)
    spread_N1 = np.repeat([0.3, 0.8], 2000)[:, None]
    sides = [outcomes_of(200 * np.exp(spread_N1 * rng.standard_normal((4000, 4)))) for _ in range(2)]
    calm, wild = ({f"t{i}" for i in range(start, start + 2000)} for start in (0, 2000))
    found = saved_shares([sides[0]], [sides[1]], {"calm": [calm], "wild": [wild]}, draws=200)
    assert set(found) == {"calm", "wild", "calm-wild"}
    for group in found.values():
        assert abs(group.value) < 0.04 and group.low < group.value < group.high
    assert found["calm-wild"].n_tasks == 4000


def test_a_lost_rollout_counts_as_one_without_a_token():
    tokens_NS = np.full((30, 3), 100.0)
    shorter = outcomes_of(0.7 * tokens_NS, lost=True)
    everything = {"all": [{f"t{i}" for i in range(30)}] * 2}
    order = np.arange(30)[::-1]  # results may list their tasks differently
    shorter = Outcomes(tuple(f"t{i}" for i in order), shorter.solved_NS[order], shorter.tokens_NS[order])
    tokens_NS[3] = shorter.tokens_NS[26] = 1000.0, 1000.0, 1000.0
    shorter.tokens_NS[26] *= 0.7
    found = saved_shares([outcomes_of(tokens_NS)] * 2, [shorter] * 2, everything, draws=100)
    assert found["all"].value == pytest.approx(0.3) and found["all"].per_seed == pytest.approx((0.3, 0.3))
    with pytest.raises(ValueError, match="no task"):
        saved_shares([shorter], [shorter], {"none": [{"elsewhere"}]}, draws=10)
