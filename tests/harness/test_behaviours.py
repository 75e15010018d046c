"""What a reward can price besides the outcome is counted as it happens, or the monitors say nothing."""

from __future__ import annotations

import asyncio

import pytest

from cadenza.harness import Agent, Limits, demo_tools
from cadenza.harness.tools import ToolLibrary, ToolResult
from cadenza.harness.windows import WindowConfig
from cadenza.tokens import Call, Summary

FILES = {"a.py": b"def f(x):\n    return x\n"}
EDIT = Call("replace_def", "a.py", "def f(x):\n    return x + 1")
READ, LIST, TESTS = Call("read_file", "a.py"), Call("list_dir"), Call("run_tests")


@pytest.fixture
def run(renderer, replay, make_sandbox):
    def run(*turns, limits=None):
        agent = Agent(renderer, demo_tools(), limits or Limits())
        return asyncio.run(agent.run(replay(*turns), make_sandbox(FILES), "Fix f."))

    return run


def test_a_call_that_can_say_nothing_new_is_not_counted_or_one_after_an_edit_is(run):
    assert run(READ, LIST, TESTS, Call("finish")).counters["needless_reruns"] == 0
    assert run(TESTS, READ, TESTS, READ, Call("finish")).counters["needless_reruns"] == 2
    assert run(TESTS, READ, EDIT, TESTS, READ, Call("finish")).counters["needless_reruns"] == 0
    assert run(READ, Call("read_file", "a.py 2"), Call("finish")).counters["needless_reruns"] == 0
    # The second edit changes nothing, so what follows it repeats.
    assert run(EDIT, TESTS, EDIT, TESTS, Call("finish")).counters["needless_reruns"] == 1


def test_a_run_goes_round_to_its_last_turn(run):
    ended = run(*[TESTS, READ, LIST] * 4)
    assert ended.finish_reason == "errors" and ended.counters["turns"] == 6
    assert ended.counters["tools"]["run_tests"] == {
        "calls": 2, "errors": {"repeated": 1}, "seconds": pytest.approx(0, abs=60)
    }  # fmt: skip
    free = run(*[TESTS, READ, LIST] * 4, Call("finish"), limits=Limits(refuse_repeats=False))
    assert free.finish_reason == "finish" and free.counters["needless_reruns"] == 9


def test_a_list_is_left_with_what_was_taken_off_it(run):
    first, done = Call("todo_write", "", "- fix f"), Call("todo_write", "", "x fix f")
    ended = run(first, done, first, Call("finish"))
    assert ended.counters["open_todos"] == 1 and ended.counters["needless_reruns"] == 0
    assert run(first, READ, first, Call("finish")).counters["needless_reruns"] == 1


def test_calls_that_fit_no_tool_are_broken_once_only(run):
    wrong = Call("nonsense")
    counters = run(wrong, READ, wrong, LIST, wrong, Call("finish")).counters
    assert counters["broken"] == 3 and counters["needless_reruns"] == 0


def test_a_call_that_the_environment_failed_cannot_be_made_again(renderer, replay, make_sandbox, monkeypatch):
    made = []

    async def slow_at_first(self, call, sandbox):
        made.append(call)
        return ToolResult("slow", "timeout") if len(made) == 1 else ToolResult("ok")

    monkeypatch.setattr(ToolLibrary, "run", slow_at_first)
    agent = Agent(renderer, demo_tools(), Limits())
    session = replay(TESTS, TESTS, TESTS, Call("finish"))
    ended = asyncio.run(agent.run(session, make_sandbox(FILES), "Fix f."))
    assert made[:2] == [TESTS, TESTS] and len(made) == 3 and ended.counters["needless_reruns"] == 1


def test_reading_again_what_a_summary_left_out_counts_as_needless(run):
    limits = Limits(max_context_tokens=2000, windows=WindowConfig(mode="summary", trigger=20, most=2))
    counters = run(READ, Summary("s"), READ, READ, Call("finish"), limits=limits).counters
    assert counters["windows"] == 2 and counters["needless_reruns"] == 1


def test_items_left_open_are_forgotten_at_the_end(run):
    def todo(text):
        return Call("todo_write", "", text)

    result = run(todo("- fix f\n- run the tests"), todo("x fix f\n- run the tests"))
    assert result.counters["open_todos"] == 1
    assert [e["output"] for e in result.trace if e.get("tool") == "todo_write"] == ["2 open", "1 open"]
    assert result.trace[-1]["summary"]["open_todos"] == 1
    assert run(todo("- fix f"), todo("x fix f")).counters["open_todos"] == 0
    assert run(todo("- fix f"), Call("todo_write")).counters["open_todos"] == 0
    assert run(LIST).counters["open_todos"] == 0


def test_the_list_does_not_survive_into_the_next_context(run, renderer):
    limits = Limits(
        max_context_tokens=2000, windows=WindowConfig(mode="summary", trigger=20, most=2, kept_steps=0)
    )
    todo = Call("todo_write", "", "- fix f\nx look\n- run the tests")
    second = run(todo, Summary("s"), Call("finish"), limits=limits).segments[1]
    text = renderer.tokenizer.decode(second.ids_T.tolist())
    assert "todo fix f; run the tests" in text and "look" not in text


@pytest.mark.parametrize(
    "call",
    [
        Call("todo_write", "now", "- a"), Call("todo_write", "", "a"), Call("todo_write", "", "- "),
        Call("todo_write", "", "- a\n" * 13), Call("todo_write", "", "- " + "a" * 79),
    ],
)  # fmt: skip
def test_a_list_that_cannot_be_read_replaces_the_one_before(run, call):
    result = run(Call("todo_write", "", "- a"), call, Call("finish"))
    assert result.counters["open_todos"] == 1 and result.counters["broken"] == 1
    assert result.counters["tools"]["todo_write"]["errors"] == {"invalid_arguments": 1}
