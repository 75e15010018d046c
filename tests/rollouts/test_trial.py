from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cadenza.core.types import TokenKind
from cadenza.harness import Agent, Limits, ToolLibrary, demo_tools
from cadenza.harness.tools import ToolResult
from cadenza.harness.tools.finish import Finish
from cadenza.harness.tools.replace_def import ReplaceDef
from cadenza.harness.tools.run_tests import RunTests
from cadenza.harness.windows import WindowConfig
from cadenza.rollouts import ExpertConfig, ScriptedExpert, Trial, run_trial, run_trials
from cadenza.rollouts.expert import MISTAKE, SCRIPTED_VERSION, _thought
from cadenza.rollouts.gold_edits import DefEdit
from cadenza.rollouts.record import from_bytes, to_bytes
from cadenza.tasks.issues import REPORTS
from cadenza.tokens import Call, Sampled, Sampling, SessionLost
from cadenza.training.config import SftDataConfig
from cadenza.training.sft import weighted_tokens

pytestmark = pytest.mark.needs_namespaces

BIG = Limits(max_tokens_per_turn=512, max_context_tokens=4096, max_output_tokens=1024)


class Script:
    """A session that plays calls and then stops."""

    def __init__(self, renderer, *calls: Call | Exception) -> None:
        self.renderer, self.calls, self.closed = renderer, list(calls), False

    async def sample(self, new_ids: list[int], sampling: Sampling) -> Sampled:
        call = self.calls.pop(0)
        if isinstance(call, Exception):
            raise call
        ids = self.renderer.render_action(call)
        return Sampled(ids, [-0.1] * len(ids), [0] * len(ids), "stop")

    def renew(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class WriteFile:
    """``write PATH\\nTEXT``, a tool of this test."""

    name = usage = "write"

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        await sandbox.write(call.args, (call.body or "").encode())
        return ToolResult("ok")


class Vanish:
    """Destroys the sandbox it runs in, then goes on using it."""

    name = usage = "vanish"

    async def __call__(self, sandbox: Any, call: Call) -> ToolResult:
        await sandbox.destroy()
        return ToolResult(" ".join(await sandbox.list()))


@pytest.fixture
def trial(renderer, backend, runner):
    """Runs one trial with scripted calls; checks that no session and no sandbox is left."""

    def run(task, *calls, limits=BIG):
        session = Script(renderer, *calls)
        agent = Agent(
            renderer, ToolLibrary([ReplaceDef(), RunTests(), Finish(), WriteFile(), Vanish()]), limits
        )
        rollout = runner.run(run_trial(task, session, backend, agent, Sampling(), 7, "g1"))
        assert session.closed and not backend._sandboxes
        return rollout

    return run


@pytest.fixture
def experts(renderer, backend, runner):
    """Runs the scripted expert on tasks."""

    def run(tasks, config, limits=BIG, seeds=2):
        agent = Agent(renderer, demo_tools(test_timeout_s=10), limits)

        async def one(t: Trial):
            session = ScriptedExpert.for_task(t.task, renderer, t.seed, config)
            return await run_trial(
                t.task, session, backend, agent, Sampling(max_tokens=512), t.seed, t.group_id
            )

        trials = [Trial(task, seed, task.id) for task in tasks for seed in range(seeds)]
        return runner.run(run_trials(trials, one, concurrency=4))

    run.renderer = renderer  # type: ignore[attr-defined]
    return run


def test_the_expert_solves_every_task_through_the_agent(experts, tasks):
    rollouts = experts(tasks, ExpertConfig(mistake=0.0))
    for rollout in rollouts:
        assert rollout.verdict.score == 1.0 and rollout.reward == 1.0, rollout.trace
        assert rollout.status == "finished" and rollout.trace[-1]["summary"]["finish_reason"] == "finish"
        assert not any(entry.get("error_kind") for entry in rollout.trace)
        (segment,) = rollout.segments
        assert segment.broken() is None and set(segment.version_S.tolist()) == {SCRIPTED_VERSION}
        assert set(rollout.timings) == {"lease", "agent", "engine_wait", "tools", "grade"}
        assert from_bytes(to_bytes(rollout)).patch == rollout.patch
    routes = {tuple(entry.get("tool") for entry in rollout.trace) for rollout in rollouts}
    assert len(routes) >= 4  # the route varies with the seed


def test_the_expert_solves_tasks_with_two_edits_in_two_files(experts, hard_tasks):
    limits = BIG.model_copy(update={"max_turns": 24})
    assert [r.verdict.score for r in experts(hard_tasks, ExpertConfig(mistake=0.0), limits, 1)] == [1.0] * 3


def test_thoughts_before_repairs_say_what_is_wrong_and_change_nothing_else(experts, tasks):
    plain = experts(tasks, ExpertConfig(mistake=0.0))
    thinking = experts(tasks, ExpertConfig(mistake=0.0, think=1.0))
    for silent, aloud in zip(plain, thinking, strict=True):
        calls = [[e for e in r.trace if e.get("tool") == "replace_def"] for r in (silent, aloud)]
        assert aloud.verdict.score == 1.0 and not any("think" in e for e in silent.trace)
        for entry in calls[1]:
            place, _, purpose = entry["think"].partition(": ")
            name, _, path = place.partition(" in ")
            assert f"replace_def {path}\n" in entry["call"] and f"def {name}(" in entry["call"]
            assert "\n" not in purpose and purpose in entry["call"]
        assert any(TokenKind.THINK in s.token_kind_T for s in aloud.segments)


def test_a_method_with_flush_lines_in_its_strings_has_no_thought():
    text = '    def f(self):\n        """Says it.\n\nTwice."""\n        return """\n{}"""'
    edit = DefEdit("m.py", "f", 2, text.format("a"), text.format("b"))
    assert _thought(edit, erred=False) == "f in m.py: Says it."
    assert _thought(edit, erred=True).splitlines()[1:] == ['- a"""', '+ b"""']


def test_the_expert_thinks_after_its_mistakes_where_only_that_is_asked(experts, tasks):
    config = ExpertConfig(mistake=1.0, mistake_other_def=0.0, think_after_mistake=1.0)
    limits = BIG.model_copy(update={"max_turns": 24})
    thought = 0
    for rollout in experts(tasks, config, limits):
        erred = False
        for entry in rollout.trace:
            if entry.get("tool") == "replace_def":
                assert ("think" in entry) == (erred and entry.get("note") != MISTAKE)
                if "think" in entry:
                    changed = entry["think"].splitlines()[1:]
                    written = [line.strip() for line in entry["call"].splitlines()]
                    assert all(line[2:] in written for line in changed if line.startswith("+ "))
                    assert 1 <= len(changed) <= 4
                    thought += 1
                erred = entry.get("note") == MISTAKE
    assert thought >= 4


def test_a_deliberate_mistake_is_marked_seen_to_fail_and_repaired(experts, tasks):
    config = ExpertConfig(mistake=1.0, mistake_other_def=0.0, mistake_again=0.5, tests_last=1.0)
    kinds = set()
    for rollout in experts(tasks, config, limits=BIG.model_copy(update={"max_turns": 24})):
        trace = rollout.trace
        notes = [i for i, entry in enumerate(trace) if entry.get("note") == MISTAKE]
        assert len({trace[i]["call"] for i in notes}) == len(notes)  # never the same text twice
        blind = False
        for at in notes:
            assert trace[at]["tool"] == "replace_def"
            if trace[at]["error_kind"] == "no_effect":
                kinds.add("unchanged")
                continue
            assert trace[at + 1]["tool"] == "run_tests"
            blind = blind or trace[at + 1]["output"].startswith("ok")
            later = [
                e for i, e in enumerate(trace) if i > at and i not in notes and e.get("tool") == "replace_def"
            ]
            assert len(later) == (0 if blind else 1)  # the task has one edit, and what follows is its repair
            kinds.add("changed")
        assert blind or rollout.verdict.score == 1.0, trace
    assert kinds == {"unchanged", "changed"}


def test_a_mistake_in_a_definition_that_was_right_is_taken_back_before_the_repair(experts, tasks):
    config = ExpertConfig(mistake=1.0, mistake_other_def=1.0, mistake_unchanged=0.3, tests_last=1.0)
    places = set()
    for rollout in experts(tasks, config, limits=BIG.model_copy(update={"max_turns": 24}), seeds=4):
        trace = [entry for entry in rollout.trace if "turn" in entry]
        wrong = [i for i, e in enumerate(trace) if e.get("note") == MISTAKE and e["tool"] == "replace_def"]
        if not wrong:  # nothing else to go astray in
            continue
        (at,) = wrong
        later = [e for e in trace[at + 1 :] if e["tool"] == "replace_def"]
        if trace[at]["error_kind"] is None:
            assert trace[at + 1]["tool"] == "run_tests" and trace[at + 2] is later[0]
            assert later[0]["call"].split("\n")[:2] == trace[at]["call"].split("\n")[:2] and len(later) == 2
        else:
            assert trace[at]["error_kind"] == "no_effect" and len(later) == 1
        assert rollout.verdict.score == 1.0, trace
        places.add(trace[at]["call"].split("\n")[0] == later[-1]["call"].split("\n")[0])
    assert places == {True, False}  # in the file to repair, and in another


def test_mistakes_that_change_nothing_end_the_experts_run(experts, tasks):
    config = ExpertConfig(mistake=1.0, mistake_again=1.0, mistake_unchanged=1.0, mistake_other_def=0.5)
    limits = BIG.model_copy(update={"max_turns": 60})
    reasons = [r.segments[-1].finish_reason for r in experts(tasks, config, limits, seeds=1)]
    assert reasons == ["finish"] * len(tasks)


def test_a_route_repeats_with_its_seed(experts, tasks):
    first, second = (experts(tasks[:2], ExpertConfig(), seeds=1) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.segments[0].ids_T.tolist() == b.segments[0].ids_T.tolist()


def test_no_work_is_a_zero_and_not_a_failure(trial, tasks):
    rollout = trial(tasks[0], Call("finish"))
    assert rollout.verdict.score == 0.0 and rollout.reward == 0.0 and rollout.patch == ""
    assert rollout.id == "g1.7" and rollout.task_id == tasks[0].id


def test_case_12_a_lost_sandbox_is_a_retryable_failure_without_reward(trial, tasks):
    rollout = trial(tasks[0], Call("vanish"), Call("finish"))
    failure = rollout.verdict.failure
    assert failure is not None and (failure.kind, failure.retry, failure.counts) == (
        "sandbox_gone",
        True,
        False,
    )
    assert rollout.reward is None and rollout.rewards == {} and rollout.status == "failed"


def test_a_lost_engine_is_a_retryable_failure_without_reward(trial, tasks):
    rollout = trial(tasks[0], SessionLost("actor died"))
    failure = rollout.verdict.failure
    assert failure is not None and (failure.kind, failure.retry, failure.counts) == (
        "engine_lost",
        True,
        False,
    )
    assert rollout.reward is None


def test_case_25_new_files_are_in_the_patch_and_what_running_leaves_is_not(trial, tasks):
    rollout = trial(tasks[0], Call("write", "new/thing.py", "x = 1\n"), Call("run_tests"), Call("finish"))
    assert "+++ b/new/thing.py" in rollout.patch
    assert rollout.patch.count("diff --git") == 1


def test_case_32_a_patch_that_steers_the_tests_counts_as_the_models_own_failure(trial, tasks):
    rollout = trial(tasks[0], Call("write", "conftest.py", "import os\n"), Call("finish"))
    failure = rollout.verdict.failure
    assert failure is not None and (failure.kind, failure.counts) == ("patch_refused", True)
    assert rollout.reward == 0.0 and rollout.status == "finished"


def test_a_file_no_patch_can_hold_counts_as_the_models_own_failure(trial, tasks):
    rollout = trial(tasks[0], Call("write", "data.bin", "\0\1"), Call("finish"))
    failure = rollout.verdict.failure
    assert failure is not None and failure.kind == "patch_refused"
    assert rollout.reward == 0.0


def test_case_6_a_run_at_its_deadline_is_still_graded(renderer, backend, runner, tasks):
    class Slow(Script):
        async def sample(self, new_ids: list[int], sampling: Sampling) -> Sampled:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    session = Slow(renderer)
    agent = Agent(renderer, demo_tools(), Limits(wall_s=0.1))

    rollout = runner.run(run_trial(tasks[0], session, backend, agent, Sampling(), 0, "g"))
    assert rollout.trace[-1]["summary"]["finish_reason"] == "deadline"
    assert rollout.verdict.score == 0.0 and session.closed


def test_cancelling_a_trial_frees_session_and_sandbox(renderer, backend, runner, tasks):
    class Slow(Script):
        async def sample(self, new_ids: list[int], sampling: Sampling) -> Sampled:
            reached.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    session = Slow(renderer)
    agent = Agent(renderer, demo_tools(), BIG)
    reached = asyncio.Event()

    async def main():
        running = asyncio.ensure_future(run_trial(tasks[0], session, backend, agent, Sampling(), 0, "g"))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    runner.run(main())
    assert session.closed and not backend._sandboxes


@pytest.mark.parametrize(
    "body",
    [
        "for _ in range(3000):\n        os.mkdir('d'); os.chdir('d')",
        "[open(f's{i}', 'w').truncate(1 << 20) for i in range(300)]",
        "os.mkfifo('fifo'); os.chmod('.', 0)",
    ],
    ids=["deep", "sparse", "unreadable"],
)
def test_a_tree_that_the_models_code_spoils_ends_the_service_or_is_run_again(tasks, trial, body):
    write = Call("write", "test_spoil.py", f"import os\ndef test_a():\n    {body}\n")
    rollout = trial(tasks[0], write, Call("run_tests"), Call("finish"))
    failure = rollout.verdict.failure
    assert failure is not None and failure.kind == "patch_refused"
    assert failure.counts and not failure.retry and rollout.reward == 0.0


def test_the_expert_forgets_what_it_was_doing_in_its_next_context(experts, hard_tasks):
    """Contexts of a few steps each: every writing is preceded, in its own context, by the file it writes into."""
    windows = WindowConfig(mode="summary", trigger=900, summary_tokens=256, kept_steps=2, most=12)
    limits = BIG.model_copy(update={"max_turns": 40, "windows": windows})
    rollouts = experts(hard_tasks, ExpertConfig(mistake=0.3), limits, 2)
    assert sum(len(r.segments) > 1 for r in rollouts) >= 4
    for rollout in rollouts:
        assert rollout.verdict.score == 1.0 or any(e.get("note") == MISTAKE for e in rollout.trace)
        assert rollout.trace[-1]["summary"]["broken_summaries"] == 0
        assert rollout.trace[-1]["summary"]["needless_reruns"] == 0, "it would teach to repeat oneself"
        assert all(s.broken() is None for s in rollout.segments)
        carried = [e["carried"] for e in rollout.trace if "carried" in e]
        assert len(carried) == len(rollout.segments) - 1
        assert all(len(text) < 300 for text in carried)
        turn = 0
        for segment in rollout.segments:
            entries = [e for e in rollout.trace if turn <= e.get("turn", -1) < turn + len(segment.turns)]
            turn += len(segment.turns)
            head = segment.ids_T[: segment.turns[0][0]].tolist()
            shown = experts.renderer.tokenizer.decode(head)
            for entry in entries:
                if entry.get("tool") == "replace_def" and len(carried) and segment.parent is not None:
                    path = entry["call"].split("\n")[0].split(" ")[1]
                    assert f"read_file {path}" in shown, (path, shown)
                shown += entry.get("call", "")


@pytest.mark.parametrize("mode", ["off", "summary", "sliding"])
def test_reports_are_read_again_only_where_nothing_carries_them_over(experts, reported_tasks, mode):
    windows = WindowConfig(mode=mode, trigger=1200, summary_tokens=256, most=24)
    limits = BIG.model_copy(update={"max_turns": 60, "windows": windows})
    again = 0
    for rollout in experts(reported_tasks, ExpertConfig(tests_last=0.5), limits, 1):
        assert rollout.verdict.score == 1.0 and rollout.trace[-1]["summary"]["finish_reason"] == "finish"
        assert rollout.trace[-1]["summary"]["needless_reruns"] == 0
        calls = [e["call"].split("\n")[0] for e in rollout.trace if "call" in e]
        assert (calls[0] == f"read_file {REPORTS}" and len(rollout.segments) > 1) or mode == "off"
        again += calls[1:].count(f"read_file {REPORTS}")
        left = 3
        for entry in rollout.trace:
            left -= entry.get("tool") == "replace_def"
            if "carried" in entry:
                named = [line for line in entry["carried"].splitlines() if line.startswith("- ")]
                assert len(named) == left and ("all fixed" in entry["carried"]) == (left == 0)
    assert again == 0 if mode != "sliding" else again >= 4


def test_a_list_of_the_experts_own_makes_up_for_what_a_window_forgets(experts, reported_tasks):
    windows = WindowConfig(mode="sliding", trigger=1200, most=24)
    limits = BIG.model_copy(update={"max_turns": 60, "windows": windows})
    for rollout in experts(reported_tasks, ExpertConfig(todo=1.0), limits, 1):
        assert rollout.verdict.score == 1.0 and len(rollout.segments) > 1
        summary = rollout.trace[-1]["summary"]
        assert summary["open_todos"] == summary["needless_reruns"] == 0
        calls = [e["call"].split("\n")[0] for e in rollout.trace if "call" in e]
        assert calls.count(f"read_file {REPORTS}") == 1 and calls.count("todo_write") == 4


def test_a_list_that_one_result_cannot_hold_is_read_on(experts, reported_tasks):
    limits = BIG.model_copy(update={"max_output_tokens": 300, "max_turns": 90})
    for rollout in experts(reported_tasks, ExpertConfig(), limits, 1):
        reads = [e["call"] for e in rollout.trace if e.get("call", "").startswith(f"read_file {REPORTS}")]
        assert rollout.verdict.score == 1.0 and len(reads) > 1


def test_a_summary_before_the_list_was_seen_does_not_say_that_all_is_fixed(experts, reported_tasks):
    windows = WindowConfig(mode="summary", trigger=350, summary_tokens=256, most=24)
    limits = BIG.model_copy(update={"max_turns": 60, "windows": windows})
    for rollout in experts(reported_tasks, ExpertConfig(), limits, 1):
        first = next(e["carried"] for e in rollout.trace if "carried" in e)
        assert len([line for line in first.splitlines() if line.startswith("- ")]) >= 2
        fixed = sum(e.get("tool") == "replace_def" for e in rollout.trace)
        assert rollout.verdict.score == 1.0 and fixed == 3


def test_demonstrations_in_several_contexts_leave_out_the_wrong_turns(experts, hard_tasks):
    windows = WindowConfig(mode="summary", trigger=500, summary_tokens=256, most=12)
    limits = BIG.model_copy(update={"max_turns": 40, "windows": windows})
    config = ExpertConfig(mistake=1.0, mistake_other_def=0.0)
    for rollout in experts(hard_tasks, config, limits, 2):
        wrong = {e["turn"] for e in rollout.trace if e.get("note") == MISTAKE}
        turn, end = 0, experts.renderer.tokenizer.id("<|end|>")
        for segment, (ids, weight) in zip(
            rollout.segments, weighted_tokens(rollout, SftDataConfig(), end), strict=True
        ):
            for start, stop in segment.turns:
                assert set(weight[start:stop].tolist()) == {0.0 if turn in wrong else 1.0}
                turn += 1
            spoken = np.flatnonzero(ids[:-1] == end) + 1
            assert all(weight[i] in (0.0, 1.0) for i in spoken)
