"""The engine against one forward pass over the whole sequence, in fp32, whatever the order of events."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_made import VOCAB, engine, policy, request, run, whole_logprobs, whole_routes

from cadenza.core.errors import TrainingDiverged
from cadenza.inference.engine import Engine
from cadenza.inference.forward import Rows
from cadenza.inference.requests import EngineConfig
from cadenza.model.digest import served_digest, weights_digest
from cadenza.model.hf import load_model

pytestmark = pytest.mark.needs_train
TOLERANCE = 2e-4


def check(model, history: list[int], sampled: list[tuple[int, float]], temperature: float = 1.0) -> None:
    """``sampled``: (position in history, log-probability the engine recorded)."""
    logp = whole_logprobs(model, history, temperature)
    for position, got in sampled:
        assert got == pytest.approx(float(logp[position - 1, history[position]]), abs=TOLERANCE)


class Talk:
    """What a client knows of one session."""

    def __init__(self, name: str, temperature: float) -> None:
        self.name, self.temperature = name, temperature
        self.history: list[int] = []
        self.sampled: list[tuple[int, float]] = []
        self.new: list[int] = []

    def answer(self, completion) -> None:
        self.history += self.new
        self.new = []
        for token, logp in zip(completion.ids, completion.logprobs, strict=True):
            self.sampled.append((len(self.history), logp))
            self.history.append(token)
        assert len(completion.ids) == len(completion.logprobs) == len(completion.versions)


@settings(max_examples=12)
@given(data=st.data())
def test_log_probs_of_ragged_sessions_differ_from_the_whole_sequence(data):
    """Sessions come and go, share prompts, take several turns; more of them than slots."""
    e = engine(slots=3, step_tokens=data.draw(st.sampled_from([1, 16, 512])))
    prompts = [[1, 2, 3, 4, 5, 6], [7] * 33, [9]]
    talks: dict[str, Talk] = {}
    asleep: set[str] = set()
    finished: list[Talk] = []
    number = 0
    for _ in range(data.draw(st.integers(5, 40))):
        what = data.draw(st.sampled_from(["new", "step", "step", "turn", "close"]))
        if what == "new" and number < 8:
            name = f"s{number}"
            number += 1
            talk = talks[name] = Talk(name, data.draw(st.sampled_from([0.7, 1.0])))
            talk.new = list(data.draw(st.sampled_from(prompts)))
            e.submit(request(name, talk.new, max_tokens=4, seed=number, temperature=talk.temperature))
        elif what == "turn" and asleep:
            name = data.draw(st.sampled_from(sorted(asleep)))
            asleep.discard(name)
            talks[name].new = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=20))
            e.submit(
                request(name, talks[name].new, max_tokens=3, seed=7, temperature=talks[name].temperature)
            )
        elif what == "close" and talks:
            name = data.draw(st.sampled_from(sorted(talks)))
            asleep.discard(name)
            finished.append(talks.pop(name))
            e.close(name)
            e.close(name)
        for completion in e.step():
            talks[completion.session].answer(completion)
            asleep.add(completion.session)
    for name in sorted(talks):  # let the rest through, freeing slots as they end
        for completion in run(e).values():
            talks[completion.session].answer(completion)
            asleep.add(completion.session)
        if name in asleep:
            e.close(name)
    for talk in [*finished, *talks.values()]:
        if talk.sampled:
            check(e.model, talk.history, talk.sampled, talk.temperature)


def test_a_nearly_full_row_beside_a_long_prompt_kills_the_engine():
    """One has a few positions left, the other is fed whole in the same pass."""
    e = engine(max_context=96)
    e.submit(request("old", range(1, 41), max_tokens=40, temperature=0.0))
    old = list(range(1, 41)) + list(run(e)["old"].ids)
    e.submit(request("old", [3] * 8, max_tokens=4, seed=1))
    e.submit(request("new", [5] * 60, max_tokens=4, seed=2))
    done = run(e)
    for name, start in (("old", old + [3] * 8), ("new", [5] * 60)):
        history = start + list(done[name].ids)
        pairs = list(zip(range(len(start), len(history)), done[name].logprobs, strict=True))
        check(e.model, history, pairs)


def test_members_of_a_group_prefill_their_prompt_again():
    e = engine(slots=4)
    prompt = list(range(1, 30))
    for i in range(4):
        e.submit(request(f"m{i}", prompt, seed=i, max_tokens=6))
    done = run(e)
    assert e.counters["prefill"] == 28 and e.counters["reused"] == 3 * 28
    for c in done.values():
        check(e.model, prompt + list(c.ids), list(zip(range(29, 29 + len(c.ids)), c.logprobs, strict=True)))
    assert len({c.ids for c in done.values()}) > 1, "different seeds, one sample"


def told(e, names, text, seeds=None, max_tokens=3):
    """One more turn of each session; the histories with what was sampled are what the caller keeps."""
    for i, name in enumerate(names):
        e.submit(request(name, text, seed=seeds[i] if seeds else 0, max_tokens=max_tokens))
    return run(e)


def test_a_tool_result_is_fed_again_to_every_member_that_did_the_same():
    e = engine(slots=4)
    names = ["a", "b", "c"]
    first = told(e, names, list(range(1, 20)), seeds=[1, 1, 2], max_tokens=4)
    assert first["a"].ids == first["b"].ids != first["c"].ids
    fed = e.counters["prefill"]
    result = list(range(28, 40))
    second = told(e, names, result, seeds=[5, 6, 7])
    assert e.counters["prefill"] == fed + 2 * 12  # the last sampled token and all but the last of the result
    for name in names:
        start = [*range(1, 20), *first[name].ids, *result]
        places = range(len(start), len(start) + 3)
        check(e.model, [*start, *second[name].ids], list(zip(places, second[name].logprobs, strict=True)))
    assert second["a"].ids != second["b"].ids, "different seeds, one sample"


@pytest.mark.parametrize("between", ["swap", "close", "nothing"])
def test_a_tool_result_is_copied_from_a_cache_of_other_weights_or_of_nobody(between):
    """``b`` has the history of ``a``, but was fed it under new weights, or ``a`` is gone when ``b`` is told more."""
    old, new = policy(0), policy(1)
    e = engine(model=copy.deepcopy(old), slots=3)
    prompt, result = list(range(1, 20)), list(range(28, 40))
    a = told(e, ["a"], prompt, max_tokens=4)["a"]
    if between == "swap":
        e.load(new.state_dict(), 1)
    told(e, ["b"], [*prompt, *a.ids[:-1]], max_tokens=1)
    e.sessions["b"].waiting = [a.ids[-1]]  # as if it had sampled that
    before = e.counters["reused"]
    told(e, ["a"], result)
    if between == "close":
        e.close("a")
        told(e, ["x"], [7] * 30)  # takes its slot
    done = told(e, ["b"], result)["b"]
    assert e.counters["reused"] == before + (12 if between == "nothing" else 0)
    start = [*prompt, *a.ids, *result]
    model = new if between == "swap" else old
    check(
        model, [*start, *done.ids], list(zip(range(len(start), len(start) + 3), done.logprobs, strict=True))
    )


def test_who_copied_a_history_is_copied_from_when_the_first_is_gone():
    e = engine(slots=3)
    prompt = list(range(1, 30))
    told(e, ["a", "b"], prompt)
    e.close("a")
    before = e.counters["reused"]
    c = told(e, ["c"], prompt)["c"]
    assert e.counters["reused"] == before + 28
    check(e.model, [*prompt, *c.ids], list(zip(range(29, 32), c.logprobs, strict=True)))


def test_a_prefix_is_copied_from_a_closed_session_or_from_old_weights():
    e = engine(slots=2)
    prompt = list(range(1, 20))
    e.submit(request("a", prompt))
    run(e)
    e.close("a")
    e.submit(request("b", [8] * 25))  # takes the slot that held the prefix
    e.submit(request("c", prompt, seed=3))
    c = run(e)["c"]
    check(e.model, prompt + list(c.ids), list(zip(range(19, 24), c.logprobs, strict=True)))
    assert e.counters["reused"] == 0
    e.close("b")
    e.load(policy(9).state_dict(), 1)
    e.submit(request("d", prompt, seed=3))
    d = run(e)["d"]
    assert e.counters["reused"] == 0
    check(e.model, prompt + list(d.ids), list(zip(range(19, 24), d.logprobs, strict=True)))


def test_a_reused_slot_remembers_its_last_owner():
    e = engine(slots=1)
    e.submit(request("a", [3] * 40, max_tokens=10))
    run(e)
    e.close("a")
    e.submit(request("b", [7], max_tokens=8))
    b = run(e)["b"]
    check(e.model, [7, *b.ids], list(zip(range(1, 9), b.logprobs, strict=True)))


SHAPES = [
    {"n_kv_heads": 4},  # one query a key-value head: no partner for it
    {"n_kv_heads": 1},
    {"n_heads": 6, "n_kv_heads": 2},  # three
    {"head_dim": 6},
    {"d_shared": 0},
    {"tie_embeddings": False},
    {"experts_per_token": 1},
    {"experts_per_token": 3},
]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shape_of_the_model_is_computed_wrongly(changes, dtype):
    """Prompts of odd and even length, longer than a block of queries, then decoding, beside each other."""
    reference = policy(4, **changes)
    e = engine(model=copy.deepcopy(reference), max_context=160, dtype=dtype, step_tokens=100)
    prompts = {"a": [3] * 77, "b": list(range(1, 34)), "c": [5]}
    for seed, (name, prompt) in enumerate(prompts.items()):
        e.submit(request(name, prompt, max_tokens=6, seed=seed))
    errors: list[float] = []
    for name, completion in run(e).items():
        history = prompts[name] + list(completion.ids)
        logp = whole_logprobs(reference, history)
        first = len(prompts[name])
        wanted = [float(logp[first - 1 + i, token]) for i, token in enumerate(completion.ids)]
        errors += [abs(a - b) for a, b in zip(wanted, completion.logprobs, strict=True)]
    if dtype == "float32":
        assert max(errors) < TOLERANCE
    else:  # rounding may send a token to another expert: the mean says whether that is the exception
        assert sum(errors) / len(errors) < 0.1


def test_a_prompt_fed_half_under_old_weights_is_copied_as_one_of_the_new():
    old, new = policy(0), policy(1)
    e = engine(model=copy.deepcopy(old), step_tokens=8)
    prompt = list(range(1, 21))
    for name in ("a", "b"):
        e.submit(request(name, prompt, seed=3, max_tokens=4))
    assert not e.step()
    e.load(new.state_dict(), 1)
    done = run(e)
    assert e.counters["reused"] == 0
    b = done["b"]  # fed wholly under the new weights
    check(new, prompt + list(b.ids), list(zip(range(20, 24), b.logprobs, strict=True)))


@pytest.mark.parametrize("taps", [0, 2])
def test_a_model_without_or_with_one_tail_is_decoded_wrongly(taps):
    e = engine(model=policy(4, short_conv=taps))
    e.submit(request("a", [3, 4, 5], max_tokens=4))
    first = run(e)["a"]
    e.submit(request("a", [6], max_tokens=4, seed=5))
    second = run(e)["a"]
    history = [3, 4, 5, *first.ids, 6, *second.ids]
    pairs = list(zip([3, 4, 5, 6, 8, 9, 10, 11], first.logprobs + second.logprobs, strict=True))
    check(e.model, history, pairs)


def test_a_full_context_writes_past_the_cache_or_never_ends():
    e = engine(slots=1, max_context=32)
    e.submit(request("a", [2] * 30, max_tokens=50))
    done = run(e)["a"]
    assert done.finish == "context" and len(done.ids) == 3  # 30 + 2 cached, and one sampled from the last
    e.submit(request("a", [1, 1], max_tokens=5))
    assert run(e)["a"].ids == ()
    e.close("a")
    e.submit(request("b", [2] * 40))
    assert run(e)["b"].finish == "context"
    e.close("b")
    e.submit(request("c", [2] * 4, max_tokens=3))
    assert run(e)["c"].finish == "length"


def test_max_tokens_or_a_stop_id_is_overrun():
    e = engine(slots=1)
    e.submit(request("a", [1, 2], max_tokens=7))
    done = run(e)["a"]
    assert (done.finish, len(done.ids)) == ("length", 7)
    e.close("a")
    e.submit(request("b", [1, 2], max_tokens=7, stop=[done.ids[3]]))
    stopped = run(e)["b"]
    cut = done.ids.index(done.ids[3]) + 1
    assert (stopped.finish, stopped.ids) == ("stop", done.ids[:cut])


def test_a_swap_in_mid_request_waits_for_its_end_or_drops_cached_keys():
    """Later log-probs are those of the new weights over keys and values cached under the old ones."""
    old, new = policy(0), policy(1)
    e = engine(model=copy.deepcopy(old), slots=1)
    e.submit(request("a", [1, 2, 3, 4], max_tokens=8))
    for _ in range(4):
        assert not e.step()
    e.load(new.state_dict(), 1)
    done = run(e)["a"]
    assert done.versions == (0, 0, 0, 1, 1, 1, 1, 1)
    assert done.weights == {0: weights_digest(old.state_dict()), 1: weights_digest(new.state_dict())}
    history = [1, 2, 3, 4, *done.ids]
    check(old, history[:7], [(4 + i, done.logprobs[i]) for i in range(3)])
    # The same by hand: a cache fed by the old weights up to where the swap came, by the new ones from there.
    other = Engine(copy.deepcopy(old), 0, e.config)
    other.forward(history[:6], Rows.of([0], [6], [0]), [])
    other.load(new.state_dict(), 1)
    other.step()
    for position in range(6, len(history) - 1):
        with torch.inference_mode():
            logits = other.forward([history[position]], Rows.of([0], [1], [position]), [0])
            logp = logits[0].log_softmax(-1)
        assert done.logprobs[position + 1 - 4] == pytest.approx(
            float(logp[history[position + 1]]), abs=TOLERANCE
        )
    fresh = whole_logprobs(new, history)
    drift = [abs(float(fresh[3 + i, done.ids[i]]) - done.logprobs[i]) for i in range(3, 8)]
    assert max(drift) > 1e-3, "the cached keys were recomputed, or the test says nothing"


def test_an_engine_echoes_the_digest_it_was_told_and_not_that_of_what_it_serves():
    """Weights that were changed on their way show, and so does a swap that did not reach a tensor."""
    e = engine(model=policy(0), dtype="bfloat16")
    e.submit(request("a", [1, 2], max_tokens=2))
    first = run(e)["a"]
    state = {k: v.to(torch.bfloat16) for k, v in policy(0).state_dict().items()}
    assert first.weights == {0: weights_digest(state)}
    state[min(state)].view(-1)[0] += 1
    e.load(state, 1)
    e.submit(request("a", [3], max_tokens=2))
    assert run(e)["a"].weights == {1: weights_digest(state)} != {1: first.weights[0]}


def test_weights_of_another_model_are_swapped_in():
    e = engine()
    e.load({"embed_tokens.weight": torch.zeros(2, 2)}, 1)
    with pytest.raises(ValueError, match="another model"):
        e.step()


def test_weights_that_are_no_numbers_answer_with_nothing_as_if_it_were_an_answer():
    e = engine()
    e.submit(request("a", [1, 2]))
    e.load({name: torch.full_like(w, float("nan")) for name, w in policy(1).state_dict().items()}, 1)
    with pytest.raises(TrainingDiverged, match="version 1 of the policy"):
        run(e)


def test_a_second_request_of_a_session_replaces_the_first():
    e = engine()
    e.submit(request("a", [1, 2]))
    with pytest.raises(ValueError, match="in flight"):
        e.submit(request("a", [3]))  # not admitted yet
    e.step()
    with pytest.raises(ValueError, match="in flight"):
        e.submit(request("a", [3]))
    with pytest.raises(ValueError, match="at least one token"):
        e.submit(request("b", []))
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match="not in 0"):
            e.submit(request("b", [1, token]))


def test_compiled_kernels_write_outside_their_arrays():
    e = engine(max_context=20, step_tokens=8)
    for ids, length in ([1] * 9, 0), ([1] * 8, 13):
        with pytest.raises(ValueError, match="do not fit"):
            e.forward(ids, Rows.of([0], [len(ids)], [length]), [0])


def test_a_session_without_a_slot_blocks_those_that_have_one():
    e = engine(slots=1)
    e.submit(request("a", [1, 2]))
    run(e)
    e.submit(request("b", [3, 4]))
    e.submit(request("a", [5]))
    assert not e.idle
    assert set(run(e)) == {"a"}
    e.close("a")
    assert set(run(e)) == {"b"}
    e.close("b")
    assert sorted(e.free) == [0] and not e.prefixes


@pytest.mark.parametrize("draft", [0, 2])
def test_recorded_routes_are_not_those_of_the_tokens(draft):
    """Turns, a prefix that was copied, guesses taken back: each position's experts are those of the whole forward."""
    model = policy(4, mtp_heads=2)
    e = engine(model=copy.deepcopy(model), draft_tokens=draft, slots=4, max_context=96)
    prompt, told, history = [5, 6, 7, 8, 9, 10, 11], {}, {}
    for i, name in enumerate(("a", "b", "c")):
        e.submit(request(name, prompt, max_tokens=9, seed=i))
        history[name], told[name] = list(prompt), []
    for turn in range(2):
        for name, done in run(e).items():
            history[name] += done.ids
            told[name].append(done.routes_TLJ)
        if turn == 0:
            for i, name in enumerate(history):
                e.submit(request(name, [1, 2], max_tokens=5, seed=7 + i))
                history[name] += [1, 2]
    assert e.counters["reused"] > 0
    for name, ids in history.items():
        routes = np.concatenate(told[name])
        assert len(routes) == len(ids) - 1  # the last token was never fed
        whole = whole_routes(model, ids)
        same = np.sort(whole[: len(routes)], -1) == np.sort(routes, -1)
        assert same.mean() > 0.99, name  # a near tie may fall either way


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_directory_has_another_digest_than_the_engine_that_serves_it(small_model, dtype):
    config = EngineConfig.model_validate({"slots": 1, "max_context": 16, "dtype": dtype})
    assert Engine(load_model(small_model), 0, config).digest == served_digest(
        small_model, getattr(torch, dtype)
    )
