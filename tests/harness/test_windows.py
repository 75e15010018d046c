"""A run that goes on in further contexts: what is carried over and trained on is neither lost nor doubled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cadenza.core.types import TokenKind
from cadenza.harness import Agent, Limits, demo_tools
from cadenza.harness.windows import WindowConfig
from cadenza.tokens import Call, Final, Sampled, Summary

FILES = {"a.py": b"def f(x):\n    return x\n", "long.py": b"\n".join(b"x%d = %d" % (i, i) for i in range(60))}


def limits(mode: str = "summary", trigger: int = 120, **changes) -> Limits:
    windows = WindowConfig.model_validate({"mode": mode, "trigger": trigger, **changes})
    return Limits(
        max_context_tokens=2000, max_turns=30, max_errors_in_a_row=30, refuse_repeats=False, windows=windows
    )


def start(renderer, session, sandbox, limits):
    agent = Agent(renderer, demo_tools(), limits)
    return asyncio.run(agent.run(session, sandbox, "Fix f."))


def check(result, session) -> None:
    """Every context is a segment, as the session saw it; every sampled id is trained once."""
    contexts = [*session.contexts, session.context]
    assert len(result.segments) == len(contexts) == result.counters["windows"]
    for i, (segment, context) in enumerate(zip(result.segments, contexts, strict=True)):
        assert segment.broken() is None and segment.ids_T.tolist() == context
        assert segment.parent == (i - 1 if i else None)
        turns = np.zeros(len(context), bool)
        for begin, end in segment.turns:
            turns[begin:end] = True
        assert (segment.sampled_T == turns).all()
    assert sum(len(s.turns) for s in result.segments) == len(session.budgets) == result.counters["turns"]
    numbers = [e["turn"] for e in result.trace if "turn" in e]
    assert numbers == list(range(len(session.budgets)))


def summarizing(session, summary: Summary):
    """The session answers every request for a summary with this one, and anything else with its prepared turns."""
    plain, renderer = session.sample, session.renderer
    query = renderer.render_query()[0]

    async def sample(new_ids, sampling):
        if new_ids[-len(query) :] == query:
            session.turns.insert(0, summary)
        return await plain(new_ids, sampling)

    session.sample = sample
    return session


def test_a_summary_its_state_or_the_last_steps_do_not_reach_the_next_context(renderer, replay, make_sandbox):
    read = Call("read_file", "a.py")
    new = Call("replace_def", "a.py", "def f(x):\n    return x + 1")
    turns = [new, *[read] * 9, Call("finish")]
    session = summarizing(replay(*turns), Summary("f is mended", think="what matters"))
    result = start(renderer, session, make_sandbox(FILES), limits(kept_steps=1, trigger=150))
    check(result, session)
    first, second = result.segments[:2]
    assert {(s.kind, s.finish_reason) for s in result.segments[:-1]} == {("summary", "summary")}
    assert (result.segments[-1].kind, result.segments[-1].finish_reason) == ("act", "finish")
    text = renderer.tokenizer.decode(second.ids_T.tolist())
    assert "Fix f." in text and "f is mended" in text and "context 2, edited a.py" in text
    output, _ = renderer.render_output("def f(x):\n    return x + 1")
    copied = renderer.render_action(read) + output
    start_of_turns = second.turns[0][0]
    assert second.ids_T[start_of_turns - len(copied) : start_of_turns].tolist() == copied
    assert "what matters" not in renderer.tokenizer.decode(second.ids_T[:start_of_turns].tolist())
    assert not second.sampled_T[:start_of_turns].any()
    assert set(second.token_kind_T[:start_of_turns].tolist()) == {TokenKind.OTHER}
    begin, end = first.turns[-1]
    assert set(first.token_kind_T[begin:end].tolist()) == {TokenKind.THINK}
    query = renderer.render_query()[0]
    assert first.ids_T[begin - len(query) : begin].tolist() == query
    (carried, *_) = [e["carried"] for e in result.trace if "carried" in e]
    assert carried == "f is mended"


@pytest.mark.parametrize(
    "turn", [Call("read_file", "a.py"), Final("done"), [1, 2, 3], Summary("too long " * 200)]
)
def test_a_broken_or_cut_summary_ends_the_run_or_is_carried_over(renderer, replay, make_sandbox, turn):
    session = replay(Call("read_file", "long.py"), turn, Call("finish"))
    result = start(renderer, session, make_sandbox(FILES), limits(kept_steps=0))
    check(result, session)
    assert result.finish_reason == "finish" and result.counters["broken_summaries"] == 1
    text = renderer.tokenizer.decode(result.segments[1].ids_T.tolist())
    assert "<|reserved_0|><|end|>" in text and "too long" not in text and "done" not in text


def test_a_sliding_window_summarizes_or_forgets_the_task(renderer, replay, make_sandbox):
    calls = [Call("read_file", "a.py") for _ in range(12)]
    session = replay(*calls, Call("finish"))
    result = start(renderer, session, make_sandbox(FILES), limits("sliding", 200))
    check(result, session)
    assert len(result.segments) > 1 and all(s.kind == "act" for s in result.segments)
    assert [s.finish_reason for s in result.segments[:-1]] == ["sliding"] * (len(result.segments) - 1)
    for segment in result.segments[1:]:
        text = renderer.tokenizer.decode(segment.ids_T.tolist())
        assert text.startswith("<|bos|><|user|>Fix f.<|end|>") and text.count("read_file a.py") >= 2
        assert "<|reserved_0|>" not in text


@pytest.mark.parametrize("mode", ["summary", "sliding"])
def test_what_was_read_last_is_gone_when_it_fills_half_a_context(renderer, replay, make_sandbox, mode):
    lines = b"\n".join(b"line_%d = %d" % (i, i) for i in range(12))
    session = replay(*[Call("read_file", "a.py")] * 4, Call("read_file", "long.py"), Call("finish"))
    if mode == "summary":
        session = summarizing(session, Summary("s"))
    step = renderer.render_action(Call("read_file", "long.py")) + renderer.render_output(lines.decode())[0]
    trigger = len(step) + 50
    result = start(
        renderer, session, make_sandbox({**FILES, "long.py": lines}), limits(mode, trigger, kept_steps=1)
    )
    check(result, session)
    later = result.segments[1]
    assert len(step) > trigger // 2
    head = later.ids_T[: later.turns[0][0]].tolist()
    assert head[-len(step) :] == step


def test_a_summary_is_written_for_a_context_that_never_begins(renderer, replay, make_sandbox):
    session = summarizing(replay(*[Call("read_file", "long.py")] * 4), Summary("s"))
    short = limits().model_copy(update={"max_turns": 2})
    result = start(renderer, session, make_sandbox(FILES), short)
    assert result.finish_reason == "max_turns" and result.segments[-1].finish_reason == "max_turns"
    assert [s.kind for s in result.segments] == ["summary", "act"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(
        st.sampled_from(
            [
                Call("read_file", "a.py"), Call("read_file", "long.py"), Call("list_dir"), Call("no_such"),
                Summary("s"), Summary("", think="t"), Final(""), Call("replace_def", "a.py", "def f(x):\n    return 2"),
            ]
        ),
        max_size=14,
    ),
    mode=st.sampled_from(["summary", "sliding"]),
    trigger=st.integers(20, 400),
    kept=st.integers(0, 4),
    most=st.integers(1, 5),
)  # fmt: skip
def test_a_token_is_lost_or_trained_twice_between_contexts(
    renderer, replay, make_sandbox, turns, mode, trigger, kept, most
):
    session = replay(*turns)
    result = start(renderer, session, make_sandbox(FILES), limits(mode, trigger, kept_steps=kept, most=most))
    check(result, session)
    assert result.counters["windows"] <= most


def test_a_context_is_left_without_room_for_its_summary():
    with pytest.raises(ValidationError, match="windows.trigger leaves no room"):
        Limits(max_context_tokens=1000, windows=WindowConfig(mode="summary", trigger=600))
    Limits(max_context_tokens=1000, windows=WindowConfig(mode="off", trigger=600))


def test_a_summary_that_does_not_fit_its_ids_is_trained_on(renderer, replay, make_sandbox):
    ids = renderer.render_action(Summary("s"))
    session = replay(
        Call("read_file", "long.py"), Sampled(ids, [-0.5], [3] * len(ids), "stop"), Call("finish")
    )
    result = start(renderer, session, make_sandbox(FILES), limits())
    begin, end = result.segments[0].turns[-1]
    assert not result.segments[0].sampled_T[begin:end].any() and result.counters["misaligned"] == 1
    assert result.segments[0].broken() is None


@pytest.mark.parametrize("mode", ["off", "summary", "sliding"])
def test_runs_with_other_windows_get_more_tokens(renderer, replay, make_sandbox, mode):
    """All that their contexts hold counts, copies and summaries too; a turn is cut where the run's tokens end."""
    for most in range(300, 340, 3):
        session = replay(*[Call("read_file", "a.py")] * 40)
        if mode == "summary":
            session = summarizing(session, Summary("s"))
        bounded = limits(mode, 150).model_copy(update={"max_run_tokens": most})
        result = start(renderer, session, make_sandbox(FILES), bounded)
        assert result.finish_reason == "budget"
        used = sum(len(s.ids_T) for s in result.segments)
        query = len(renderer.render_query()[0]) + 1 if mode == "summary" else 0
        assert most - 120 <= used <= most + query, "what would not fit is left out"
