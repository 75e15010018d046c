"""Demonstrations to batches: what counts, what is held out, each sequence once an epoch; when a curve is flat."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_made import policy, rollout, segment

from cadenza.core.errors import MissingArtifact
from cadenza.training.config import SftDataConfig
from cadenza.training.sft import Plateau, epoch_batches, only_actions, split_demonstrations, weighted_tokens

pytestmark = pytest.mark.needs_train

SEGMENT = segment(policy(), 1)
END = 2_000  # in none of the segments


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60),
    per_step=st.integers(1, 2000),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_an_epoch_repeats_or_misses_a_sequence(lengths, per_step, seed, epoch):
    sequences = [(np.zeros(n, np.uint16), np.ones(n, np.float32)) for n in lengths]
    steps = epoch_batches(sequences, per_step, seed, epoch)
    assert sorted(i for step in steps for i in step) == list(range(len(lengths)))
    assert all(steps) and steps == epoch_batches(sequences, per_step, seed, epoch)
    for step in steps:
        assert sum(lengths[i] for i in step[:-1]) < per_step


def test_two_epochs_share_their_order():
    sequences = [(np.zeros(5, np.uint16), np.ones(5, np.float32))] * 30
    assert epoch_batches(sequences, 50, 0, 0) != epoch_batches(sequences, 50, 0, 1)


def test_a_deliberate_mistake_is_learned_or_tool_output_weighs_as_much_as_an_action():
    s = dataclasses.replace(SEGMENT, sampled_T=SEGMENT.sampled_T.copy())
    s.sampled_T[:] = False
    s.sampled_T[4:8] = s.sampled_T[12:15] = True
    s.turns = [(4, 8), (12, 15)]
    r = rollout("r", 1.0, [s])
    r.trace = [{"turn": 0, "note": "mistake"}, {"turn": 1}, {"summary": {}}]
    ((ids, weight),) = weighted_tokens(r, SftDataConfig(context_weight=0.1, mistake_weight=0.0), END)
    assert ids.tolist() == s.ids_T.tolist()
    assert (weight[4:8] == 0).all() and (weight[12:15] == 1).all() and weight[0] == pytest.approx(0.1)
    assert only_actions([(ids, weight)])[0][1].sum() == 3


def test_a_role_that_is_not_the_policys_is_trained_in_a_later_context():
    """Prompt, copied steps and query end messages too; what follows them is for the policy to say."""
    first = dataclasses.replace(SEGMENT, ids_T=np.arange(100, 100 + len(SEGMENT.ids_T), dtype=np.int32))
    first.sampled_T = np.zeros(len(first.ids_T), np.bool_)
    first.sampled_T[4:8] = first.sampled_T[12:15] = True
    first.turns = [(4, 8), (12, 15)]
    first.ids_T[[3, 7, 11, 14]] = END
    later = dataclasses.replace(first, ids_T=first.ids_T.copy(), sampled_T=first.sampled_T.copy())
    later.sampled_T[:] = False
    later.sampled_T[12:15] = True
    later.turns = [(12, 15)]
    later.ids_T[12:15] = 300, 301, END
    r = rollout("r", 1.0, [first, later])
    r.trace = [{"turn": 0, "note": "mistake"}, {"turn": 1}, {"turn": 2}, {"summary": {}}]
    (_, a), (_, b) = weighted_tokens(r, SftDataConfig(context_weight=0.1, mistake_weight=0.0), END)
    assert a[[8, 15]].tolist() == [0, 0] and (a[4:8] == 0).all() and (a[12:15] == 1).all()
    assert b[[4, 8, 15]].tolist() == [0, 0, 0]  # after the prompt, the copied step and the turn
    assert (b[4:8] == 0).all() and (b[12:15] == 1).all()  # the copied mistake is not learned either
    assert b[[1, 2, 3, 9, 10, 11]] == pytest.approx(0.1)


@given(tasks=st.integers(2, 30), share=st.floats(0.01, 1.0), seed=st.integers(0, 5))
def test_a_task_is_trained_and_validated_on(tasks, share, seed):
    rollouts = []
    for i in range(2 * tasks):
        s = dataclasses.replace(SEGMENT, ids_T=SEGMENT.ids_T.copy())
        s.ids_T[0] = i // 2  # which task
        rollouts.append(rollout(f"r{i}", 1.0, [s], task=f"t{i // 2}"))
    train, validation = split_demonstrations(rollouts, SftDataConfig(validation_share=share), seed, END)
    a, b = ({int(ids[0]) for ids, _ in part} for part in (train, validation))
    assert a and b and not a & b and len(train) + len(validation) == 2 * tasks


def test_one_task_ends_in_a_division_by_zero():
    with pytest.raises(MissingArtifact, match="too few"):
        split_demonstrations([rollout("r", 1.0, [SEGMENT])], SftDataConfig(), 0, END)


def test_a_slow_fall_never_ends_or_a_plateau_is_missed():
    plateau = Plateau(patience=2, tolerance=0.01)
    assert plateau.observe(1.0) and plateau.observe(0.9) and not plateau.flat
    assert plateau.observe(0.899) and not plateau.flat  # better, but not by a hundredth
    assert not plateau.observe(0.95) and plateau.flat
    assert plateau.best == 0.899
    steady = Plateau(patience=2, tolerance=0.01)
    for i in range(20):
        assert steady.observe(0.9**i)
    assert not steady.flat
    for _ in range(2):
        assert not steady.observe(float("nan"))
    assert steady.flat
