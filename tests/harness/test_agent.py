from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.core.types import TokenKind
from cadenza.harness import Agent, Limits, demo_tools
from cadenza.sandbox.errors import SandboxGone
from cadenza.tokens import Call, Final, Sampled, Sampling, SessionLost

FILES = {"a.py": b"def f(x):\n    return x\n"}


def start(renderer, session, sandbox, prompt="Fix f.", limits=None, **keywords):
    agent = Agent(renderer, demo_tools(), limits or Limits())
    return asyncio.run(agent.run(session, sandbox, prompt, **keywords))


def check_invariants(result, session, renderer):
    """The segment is what the session saw, and everything lines up."""
    for segment in result.segments:
        assert segment.broken() is None
        assert segment.ids_T.tolist() == session.context[: len(segment.ids_T)]
        assert len(segment.ids_T) == len(session.context)
        covered = np.zeros(len(segment.ids_T), bool)
        for begin, end in segment.turns:
            assert 0 <= begin <= end <= len(segment.ids_T)
            assert not covered[begin:end].any()
            covered[begin:end] = True
        assert not (segment.sampled_T & ~covered).any()
        kinds = segment.token_kind_T[segment.sampled_T]
        assert set(kinds.tolist()) <= {TokenKind.THINK, TokenKind.CALL, TokenKind.FINAL}
        given_kinds = segment.token_kind_T[~covered]
        assert set(given_kinds.tolist()) <= {TokenKind.OTHER, TokenKind.OUTPUT}
        assert segment.finish_reason == result.finish_reason


garbage = st.lists(st.integers(0, 30) | st.integers(0, 700), max_size=40)
calls = st.builds(
    Call,
    st.sampled_from(["list_dir", "read_file", "grep", "replace_def", "run_tests", "no_such", "finish"]),
    st.sampled_from(
        ["", "a.py", "a.py 1", "a.py 9", "a.py x", "../x", "/etc/passwd", "b", "a.py 1 2", " ", "a.py  1"]
    )
    | st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12),
    st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
)
odd = st.builds(
    Sampled,
    garbage,
    st.lists(st.floats(-1e300, 0) | st.just(math.nan) | st.just(-math.inf), max_size=40),
    st.lists(st.integers(0, 9), max_size=40),
    st.sampled_from(["stop", "length"]),
)
limits = st.builds(
    Limits,
    max_turns=st.integers(1, 12),
    max_tokens_per_turn=st.integers(1, 60),
    max_context_tokens=st.integers(1, 400),
    max_output_tokens=st.integers(1, 100),
    max_errors_in_a_row=st.integers(1, 4),
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(garbage | calls | odd, max_size=14), limits=limits, prompt=st.text(max_size=40))
def test_no_sampled_garbage_breaks_the_run_or_the_segment(
    renderer, replay, make_sandbox, turns, limits, prompt
):
    session = replay(*turns)
    result = start(renderer, session, make_sandbox(FILES), prompt, limits)
    assert result.finish_reason in ("finish", "max_turns", "max_tokens", "context", "errors")
    check_invariants(result, session, renderer)
    assert len(session.budgets) <= limits.max_turns
    assert all(0 < budget <= limits.max_tokens_per_turn for budget in session.budgets)
    assert result.trace[-1]["summary"]["finish_reason"] == result.finish_reason


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(calls, max_size=14), limits=limits)
def test_the_context_limit_holds_for_a_session_that_keeps_its_budget(
    renderer, replay, make_sandbox, turns, limits
):
    session = replay(*turns)
    start(renderer, session, make_sandbox(FILES), "Fix.", limits)
    assert len(session.context) <= limits.max_context_tokens


def test_a_run_reads_edits_tests_and_finishes(renderer, replay, make_sandbox):
    sandbox = make_sandbox(FILES)
    session = replay(
        Call("list_dir"),
        Call("read_file", "a.py"),
        Call("replace_def", "a.py", "def f(x):\n    return x + 1", think="off by one"),
        Call("run_tests"),
        Call("finish"),
    )
    steps = []
    result = start(renderer, session, sandbox, on_step=steps.append)
    assert result.finish_reason == "finish"
    assert sandbox.files["a.py"] == b"def f(x):\n    return x + 1\n"
    assert [step.get("output") for step in steps] == [
        "a.py", "def f(x):\n    return x", "ok", "ok: 1 passed", "", None,
    ]  # fmt: skip
    assert steps == result.trace and steps[2]["think"] == "off by one"
    check_invariants(result, session, renderer)
    (segment,) = result.segments
    text = renderer.tokenizer.decode(segment.ids_T.tolist())
    assert text == (
        "<|bos|><|user|>Fix f.<|end|><|call|>list_dir<|end|><|output|>a.py<|end|>"
        "<|call|>read_file a.py<|end|><|output|>def f(x):\n    return x<|end|>"
        "<|think|>off by one<|end|><|call|>replace_def a.py\ndef f(x):\n    return x + 1<|end|><|output|>ok<|end|>"
        "<|call|>run_tests<|end|><|output|>ok: 1 passed<|end|><|call|>finish<|end|>"
    )
    assert segment.version_S.tolist() == [3] * int(segment.sampled_T.sum())
    assert segment.digests["weights"] == "3:w3" and all(segment.digests.values())
    assert result.counters["tools"]["run_tests"]["calls"] == 1


def test_a_closing_message_ends_the_run(renderer, replay, make_sandbox):
    result = start(renderer, replay(Final("done")), make_sandbox(FILES))
    assert result.finish_reason == "finish" and result.trace[0]["final"] == "done"


def test_case_15_a_broken_call_gets_an_error_and_the_run_goes_on(renderer, replay, make_sandbox):
    t = renderer.tokenizer
    broken = [t.id("<|call|>"), *t.encode('{"cmd": "ls'), renderer.end_id]
    result = start(
        renderer, replay(broken, Call("list_dir"), Call("nonsense"), Call("finish")), make_sandbox(FILES)
    )
    assert result.finish_reason == "finish"
    kinds = [entry.get("error_kind") for entry in result.trace[:-1]]
    assert kinds == ["bad_name", None, "unknown_tool", None]
    assert result.trace[0]["output"] == "error: no tool name" and result.trace[1]["output"] == "a.py"
    assert result.counters["broken"] == 2


@pytest.mark.parametrize("call", [None, Call("nonsense"), Call("read_file", "missing.py")])
def test_failing_calls_without_end_go_on_until_the_turns_are_used_up(renderer, replay, make_sandbox, call):
    session = replay(*[call or [renderer.end_id]] * 10)
    result = start(renderer, session, make_sandbox(FILES), limits=Limits(max_errors_in_a_row=3))
    assert result.finish_reason == "errors" and len(session.budgets) == 3


def test_errors_with_work_between_them_end_the_run(renderer, replay, make_sandbox):
    turns = [Call("nonsense"), Call("nonsense"), Call("list_dir")] * 3 + [Call("finish")]
    limits = Limits(max_errors_in_a_row=3, refuse_repeats=False)
    result = start(renderer, replay(*turns), make_sandbox(FILES), limits=limits)
    assert result.finish_reason == "finish"


def test_faults_of_the_environment_end_the_run_or_hide_errors_of_the_model(renderer, replay, make_sandbox):
    class Full(make_sandbox):
        async def write(self, path, data):
            raise OSError(28, "No space left on device", path)

    edit, wrong = Call("replace_def", "a.py", "def f(x):\n    return 5"), Call("nonsense")
    result = start(
        renderer, replay(*[edit] * 5, Call("finish")), Full(FILES), limits=Limits(max_errors_in_a_row=3)
    )
    assert [entry.get("error_kind") for entry in result.trace[:5]] == ["unexpected_environment"] * 5
    assert result.finish_reason == "finish"
    session = replay(wrong, edit, wrong, edit, wrong, Call("finish"))
    result = start(renderer, session, Full(FILES), limits=Limits(max_errors_in_a_row=3))
    assert result.finish_reason == "errors" and len(session.budgets) == 5


def test_case_18_a_cut_turn_is_flagged_and_not_executed(renderer, replay, make_sandbox):
    sandbox = make_sandbox(FILES)
    whole = renderer.render_action(Call("replace_def", "a.py", "def f(x):\n    return 1"))
    session = replay(Sampled(whole, [0.0] * len(whole), [1] * len(whole), "length"))
    result = start(renderer, session, sandbox)
    assert result.finish_reason == "max_tokens" and sandbox.files == FILES
    assert result.trace[0]["error_kind"] == "truncated" and result.counters["truncated"] == 1
    assert int(result.segments[0].sampled_T.sum()) == len(whole)


def test_case_17_a_full_context_is_a_clean_end(renderer, replay, make_sandbox):
    session = replay(*[Call("read_file", "a.py")] * 16)
    result = start(renderer, session, make_sandbox(FILES), limits=Limits(max_context_tokens=100))
    assert result.finish_reason == "context"
    assert len(session.context) <= 100


def test_a_prompt_over_the_limit_never_reaches_the_engine(renderer, replay, make_sandbox):
    session = replay()
    result = start(renderer, session, make_sandbox(FILES), "word " * 400, Limits(max_context_tokens=100))
    assert result.finish_reason == "context" and result.segments == [] and session.budgets == []


def test_a_turn_whose_log_probs_do_not_fit_is_masked_not_padded(renderer, replay, make_sandbox):
    ids = renderer.render_action(Call("list_dir"))
    session = replay(Sampled(ids, [0.0] * (len(ids) - 1), [1] * len(ids), "stop"), Call("finish"))
    result = start(renderer, session, make_sandbox(FILES))
    (segment,) = result.segments
    begin, end = segment.turns[0]
    assert not segment.sampled_T[begin:end].any() and result.counters["misaligned"] == 1
    assert result.finish_reason == "finish"
    check_invariants(result, session, renderer)


def test_a_long_output_keeps_its_head_and_says_what_is_missing(renderer, replay, make_sandbox):
    files = {"long.py": b"".join(b"value_%d = result\n" % n for n in range(500))}
    session = replay(Call("read_file", "long.py"), Call("finish"))
    start(renderer, session, make_sandbox(files), limits=Limits(max_output_tokens=100))
    text = renderer.tokenizer.decode(session.context)
    assert "value_0 = result\nvalue_1" in text and "more lines]<|end|>" in text
    shown = text.count("= result")
    assert f"[cut: {500 - shown} more lines]" in text
    assert len(session.context) < 200


def test_case_12_a_lost_sandbox_stops_the_run_and_is_not_shown_to_the_model(renderer, replay, make_sandbox):
    class Dying(make_sandbox):
        async def list(self, path="."):
            raise SandboxGone("killed")

    session = replay(Call("list_dir"), Call("finish"))
    with pytest.raises(SandboxGone):
        start(renderer, session, Dying(FILES))
    assert len(session.budgets) == 1


def test_a_lost_engine_is_raised_as_such(renderer, make_sandbox):
    class Lost:
        async def sample(self, new_ids, sampling):
            raise SessionLost("engine died")

        def close(self):
            pass

    with pytest.raises(SessionLost):
        start(renderer, Lost(), make_sandbox(FILES))


@pytest.mark.parametrize("where", ["engine", "tool"])
def test_the_wall_deadline_ends_a_run_that_hangs(renderer, replay, make_sandbox, where):
    class Hanging(make_sandbox):
        async def list(self, path="."):
            await asyncio.Event().wait()

    class Silent:
        context: list[int] = []

        async def sample(self, new_ids, sampling):
            await asyncio.Event().wait()

        def close(self):
            pass

    session = Silent() if where == "engine" else replay(Call("list_dir"))
    result = start(renderer, session, Hanging(FILES), limits=Limits(wall_s=0.05))
    assert result.finish_reason == "deadline"
    assert result.trace[-1]["summary"]["finish_reason"] == "deadline"
    if where == "tool":
        assert result.trace[0]["tool"] == "list_dir" and result.trace[0]["error_kind"] == "deadline"
        check_invariants(result, session, renderer)


def test_the_turn_budget_of_the_sampling_is_kept(renderer, replay, make_sandbox):
    session = replay(Call("list_dir"), Call("finish"))
    result = start(renderer, session, make_sandbox(FILES), sampling=Sampling(temperature=0.7, max_tokens=20))
    assert session.budgets == [20, 20]
    assert result.segments[0].sampling == {"temperature": 0.7, "max_tokens": 20.0}
