"""Guessing ahead must not show in what is sampled, only in how many passes it took."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_made import VOCAB, engine, policy, request, run

from cadenza.core.errors import ConfigError
from cadenza.inference.speculative import held

pytestmark = pytest.mark.needs_train


def same(a, b) -> None:
    """Same tokens; log-probabilities as far as two shapes of the same product agree."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].ids == b[name].ids and a[name].finish == b[name].finish
        assert a[name].logprobs == pytest.approx(b[name].logprobs, abs=2e-4)
        assert a[name].versions == b[name].versions and a[name].weights == b[name].weights


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=4),
)
def test_what_is_sampled_depends_on_the_guesses(seed, tokens, temperature, prompts):
    """Random heads: nearly every guess is wrong, and every pass is taken back to its first token."""
    answers = []
    for draft in (0, tokens):
        e = engine(model=policy(seed % 7, mtp_heads=3), draft_tokens=draft, draft_rows=4)
        for i, prompt in enumerate(prompts):
            e.submit(request(f"s{i}", prompt, max_tokens=12, temperature=temperature, seed=seed + i))
        first = run(e)
        for i in range(len(prompts)):
            e.submit(request(f"s{i}", [3, 1, 4], max_tokens=9, temperature=temperature, seed=seed - i))
        answers.append((first, run(e), e.counters))
    same(answers[0][0], answers[1][0])
    same(answers[0][1], answers[1][1])
    assert answers[1][2]["guessed"] > 0 == answers[0][2]["guessed"]


class Oracle:
    """Guesses what plain decoding said, each token right with some probability."""

    def __init__(self, seed: int, share: float, tokens: int) -> None:
        self.rng, self.share, self.tokens = random.Random(seed), share, tokens
        self.said: tuple[int, ...] = ()
        self.most = 0

    def guess(self, _states, _last, _temperature, uniforms) -> list[list[int]]:
        rows = []
        for numbers in uniforms:
            ahead = [*self.said[self.most - 1 - len(numbers) :], *([0] * self.tokens)]
            rows.append([self._maybe(t) for t in ahead[: min(self.tokens, len(numbers))]])
        return rows

    def _maybe(self, token: int) -> int:
        return token if self.rng.random() < self.share else (token + 1) % VOCAB


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 4),
    share=st.sampled_from([0.3, 0.8, 1.0]),
    stops=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    short_conv=st.sampled_from([0, 2, 3]),
)
def test_any_number_of_guesses_that_hold_leaves_another_state(seed, tokens, share, stops, short_conv):
    """Guesses that are right as often as the seed says, cut by stop tokens and limits; then another turn, which reads
    the cache and the convolution's tail that they left."""

    def make(draft: int):
        return engine(model=policy(seed % 5, mtp_heads=4, short_conv=short_conv), draft_tokens=draft)

    plain, guessing = make(0), make(4)
    oracle = Oracle(seed, share, tokens)
    assert guessing.drafter is not None
    guessing.drafter.guess = oracle.guess  # pyright: ignore[reportAttributeAccessIssue]
    for turn, (ids, most) in enumerate((([5, 6, 7], 30), ([8, 9], 20))):
        asked = request("s", ids, max_tokens=most, seed=seed + turn, stop=stops)
        plain.submit(asked)
        truth = run(plain)
        oracle.said, oracle.most = truth["s"].ids, most
        guessing.submit(asked)
        same(truth, run(guessing))
    assert guessing.counters["steps"] <= plain.counters["steps"]
    if share == 1.0 and not stops:
        assert guessing.counters["held"] == guessing.counters["guessed"] > 0


def test_guesses_that_all_hold_save_no_pass():
    plain = engine(model=policy(1, mtp_heads=3))
    plain.submit(request("s", [1, 2, 3], max_tokens=40, temperature=0.0))
    said = run(plain)["s"].ids
    e = engine(model=policy(1, mtp_heads=3), draft_tokens=3)
    e.drafter.guess = lambda _s, _l, _t, u: [list(said[39 - len(u[0]) :][:3])[: len(u[0])]]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    e.submit(request("s", [1, 2, 3], max_tokens=40, temperature=0.0))
    assert run(e)["s"].ids == said
    assert e.counters["steps"] <= plain.counters["steps"] / 3 and e.counters["sampled"] == 40


def test_a_full_context_is_overrun_by_guesses():
    for draft in (0, 3):
        e = engine(model=policy(2, mtp_heads=3), draft_tokens=draft, max_context=20)
        e.submit(request("s", [1] * 10, max_tokens=64))
        done = run(e)["s"]
        assert done.finish == "context" and len(done.ids) == 11


def test_many_rows_are_guessed_for_at_a_loss():
    e = engine(model=policy(3, mtp_heads=2), draft_tokens=2, draft_rows=2, slots=4)
    for i in range(4):
        e.submit(request(f"s{i}", [i + 1], max_tokens=6, seed=i))
    e.step()
    assert e.counters["guessed"] == 0
    assert all(not s.draft for s in e.sessions.values())


def test_a_model_without_heads_guesses_silently_nothing():
    with pytest.raises(ConfigError, match="has 0 multi-token prediction heads"):
        engine(model=policy(0), draft_tokens=1)
    assert engine(model=policy(0)).drafter is None


def test_heads_lie_idle_unless_a_recipe_says_how_many_there_are():
    e = engine(model=policy(0, mtp_heads=3))
    assert e.drafter is not None and e.drafter.tokens == 3
    assert "guessed_3" in e.counters
    assert engine(model=policy(0, mtp_heads=3), draft_tokens=0).drafter is None


def test_new_weights_reach_the_heads_or_not():
    e = engine(model=policy(0, mtp_heads=1), draft_tokens=1)
    other = policy(9, mtp_heads=1).state_dict()
    e.load({k: v.clone() for k, v in other.items()}, 1)
    e.submit(request("s", [1, 2], max_tokens=8))
    done = run(e)["s"]
    plain = engine(model=policy(9, mtp_heads=1), draft_tokens=0)
    plain.submit(request("s", [1, 2], max_tokens=8))
    assert done.ids == run(plain)["s"].ids
    assert torch.equal(e.model.mtp[0].join.weight, other["mtp.0.join.weight"])  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("guessed", "drawn", "count"),
    [([], [4], 1), ([4], [4, 5], 2), ([4], [3, 5], 1), ([4, 5], [4, 6, 7], 2), ([4, 5], [4, 5, 7], 3)],
)
def test_the_draw_after_the_last_guess_is_lost(guessed, drawn, count):
    assert held(guessed, drawn) == count
