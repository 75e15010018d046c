"""The whole agent loop, top to bottom. Users and training run this same code.

A turn: send what is new to the session, take the sampled ids as they are, read them, run the call, render its result
as what is new for the next turn. The context is kept by the session and never rendered again, so the segment handed
to the trainer is exactly what the engine saw.

What ends a run (``finish_reason``):
``finish``      the model called finish or wrote a closing message
``max_turns``   too many turns
``budget``      too many tokens in all its contexts
``max_tokens``  a turn was cut at its token limit; it is flagged and not executed
``context``     the context is full; a turn cut by it is not executed either (with ``windows`` a run goes on in the next
                context before that, see there)
``errors``      too many calls one after another were broken, refused, repeated or without effect; one only gets an
                error as its result, but a model that repeats itself would go on until something else ends it. Every
                kind of error counts but ``unexpected_environment``, which is not the model's doing: it neither adds
                to the row nor ends it
``deadline``    the wall time is over
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cadenza.core.types import Segment, TokenKind, format_weights
from cadenza.harness.limits import Limits
from cadenza.harness.tools import ToolLibrary, ToolResult
from cadenza.harness.windows import Window, carried_over, next_context
from cadenza.tokens import BrokenCall, Call, CompactRenderer, Final, Parsed, Sampled, Sampling, TokenSession


@dataclass(slots=True)
class AgentResult:
    """What one run leaves. ``trace`` ends with one ``{"summary": ...}`` entry that holds ``counters``.

    ``timings``: seconds in ``agent`` (all), ``engine_wait`` and ``tools``.
    ``counters``: turns, broken, truncated, misaligned, windows (contexts), broken_summaries, open_todos (left on the
    model's list), needless_reruns (calls that had been made in the same context, and nothing was edited since), and per
    tool calls, errors by kind, seconds.
    """

    segments: list[Segment]
    trace: list[dict[str, Any]]
    finish_reason: str
    timings: dict[str, float]
    counters: dict[str, Any]


_COUNTED = ("turns", "broken", "truncated", "misaligned", "broken_summaries", "open_todos", "needless_reruns")
# What the same call would bring again. One that does not fit its tool counts as broken each time, and the environment
# may do better the next time.
_SAYS_THE_SAME = (None, "not_found", "refused", "no_effect")
REPEATED = "error: same call as before, nothing has changed since"
NOTHING_YET = dict.fromkeys(_COUNTED, 0) | {"windows": 1}


@dataclass(slots=True)
class _Run:
    """The state of one run, so that it is whole whenever the deadline strikes."""

    window: Window
    sampling: Sampling
    digests: dict[str, str]
    on_step: Callable[[dict[str, Any]], None] | None
    segments: list[Segment] = field(default_factory=list)  # of the contexts before this one
    trace: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0  # sampled, summaries too: the index of the next in the trace
    edited: list[str] = field(default_factory=list)
    todos: tuple[str, ...] = ()  # open ones
    made: set[tuple[str, str]] = field(
        default_factory=set
    )  # (tool, call) of this context since the last edit
    spent: int = 0  # tokens of the contexts before this one
    errors_in_a_row: int = 0
    engine_s: float = 0.0
    tools_s: float = 0.0
    counters: dict[str, Any] = field(default_factory=lambda: {**NOTHING_YET, "tools": {}})

    def left(self, limits: Limits, new_ids: list[int]) -> float:
        """Tokens that the run may still hold when these are added to its context."""
        return (limits.max_run_tokens or math.inf) - self.spent - len(self.window.builder) - len(new_ids)

    def close(self, finish_reason: str, kind: str = "act") -> None:
        """The present context becomes a segment."""
        builder = self.window.builder
        self.spent += len(builder)
        self.segments += builder.build(
            finish_reason=finish_reason,
            sampling=self.sampling.plain(),
            digests={**self.digests, "weights": format_weights(builder.weights)},
            kind=kind,
            parent=len(self.segments) - 1 if self.segments else None,
        )

    def log(self, entry: dict[str, Any]) -> None:
        self.trace.append(entry)
        if self.on_step is not None:
            self.on_step(entry)


class Agent:
    """One agent, stateless between runs and safe to run many times at once."""

    def __init__(self, renderer: CompactRenderer, tools: ToolLibrary, limits: Limits | None = None) -> None:
        self.renderer = renderer
        self.tools = tools
        self.limits = limits or Limits()

    async def run(
        self,
        session: TokenSession,
        sandbox: Any,
        task_prompt: str,
        sampling: Sampling | None = None,
        *,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> AgentResult:
        """Runs to the end and returns; the caller owns ``session`` and ``sandbox`` and frees them.

        Raises SessionLost, SandboxGone (it ended under a tool), DeadlineExceeded of a sandbox that does not answer, and
        CancelledError; nothing the model samples raises.
        """
        digests = {
            "harness": HARNESS_DIGEST,
            "tools": self.tools.digest,
            "renderer": self.renderer.digest,
        }
        run = _Run(Window(), sampling or Sampling(), digests, on_step)
        begun = time.perf_counter()
        wall = asyncio.timeout(self.limits.wall_s)
        try:
            async with wall:
                reason = await self._loop(run, session, sandbox, task_prompt)
        except TimeoutError:
            if not wall.expired():
                raise
            reason = "deadline"
        timings = {"agent": time.perf_counter() - begun, "engine_wait": run.engine_s, "tools": run.tools_s}
        run.counters |= {"turns": run.turns, "open_todos": len(run.todos)}
        run.log({"summary": {"finish_reason": reason, **run.counters}})
        run.close(reason)
        return AgentResult(run.segments, run.trace, reason, timings, run.counters)

    async def _loop(self, run: _Run, session: TokenSession, sandbox: Any, task_prompt: str) -> str:
        limits = self.limits
        new_ids, new_kinds = self.renderer.render_prompt(task_prompt)
        prompt_ids = new_ids
        for left in reversed(range(limits.max_turns)):
            builder = run.window.builder
            bounds = {
                "max_tokens": min(limits.max_tokens_per_turn, run.sampling.max_tokens),
                "context": limits.max_context_tokens - len(builder) - len(new_ids),
                "budget": run.left(limits, new_ids),
            }
            reason, most = min(bounds.items(), key=lambda bound: bound[1])
            if most <= 0:
                return reason
            sampled = await self._sample(run, session, new_ids, int(most))
            entry = self._add(run, sampled, new_ids, new_kinds, self.renderer.kinds_of_sampled(sampled.ids))
            if sampled.finish == "length":
                run.counters["truncated"] += 1
                text = self.renderer.tokenizer.decode(sampled.ids)
                run.log({**entry, "text": text, "error_kind": "truncated"})
                return reason
            parsed = self.renderer.parse(sampled.ids)
            entry |= _readable(parsed)
            if isinstance(parsed.action, BrokenCall):
                entry["text"] = self.renderer.tokenizer.decode(sampled.ids)
            try:
                result = await self._act(run, parsed, sandbox)
            except asyncio.CancelledError:
                run.log({**entry, "error_kind": "deadline"})
                raise
            run.log({**entry, "output": result.text, "error_kind": result.error_kind})
            if result.ends:
                return "finish"
            if result.error_kind != "unexpected_environment":
                run.errors_in_a_row = run.errors_in_a_row + 1 if result.error_kind is not None else 0
            if run.errors_in_a_row >= limits.max_errors_in_a_row:
                return "errors"
            new_ids, new_kinds = self._render_result(result.text)
            windows = limits.windows
            if run.left(limits, new_ids) <= 0:
                return "budget"
            full = len(run.window.builder) + len(new_ids) > windows.trigger
            if windows.mode != "off" and full and left and run.counters["windows"] < windows.most:
                new_ids, new_kinds = await self._next_window(run, session, prompt_ids, new_ids, new_kinds)
        return "max_turns"

    def _add(
        self, run: _Run, sampled: Sampled, new_ids: list[int], new_kinds: list[int], kinds: list[int]
    ) -> dict[str, Any]:
        """Adds a turn to the present context; the beginning of its entry in the trace."""
        window = run.window
        window.builder.add_given(new_ids, new_kinds)
        start = len(window.builder)
        aligned = window.builder.add_sampled(sampled, kinds)
        window.step_taken(start)
        entry: dict[str, Any] = {"turn": run.turns}
        run.turns += 1
        if sampled.note is not None:
            entry["note"] = sampled.note
        if not aligned:
            run.counters["misaligned"] += 1
            entry["misaligned"] = True
        return entry

    async def _next_window(
        self, run: _Run, session: TokenSession, prompt: list[int], result: list[int], kinds: list[int]
    ) -> tuple[list[int], list[int]]:
        """Leaves the present context, with a summary if there is to be one; what the next begins with."""
        windows, left = self.limits.windows, run.window
        steps = list(left.steps)
        summary: str | None = None
        if windows.mode == "summary":
            query, query_kinds = self.renderer.render_query()
            asked, asked_kinds = result + query, kinds + query_kinds
            most = max(1, min(windows.summary_tokens, run.left(self.limits, asked)))
            sampled = await self._sample(run, session, asked, int(most))
            # Counted as thinking: it is no message to the user.
            entry = self._add(run, sampled, asked, asked_kinds, [int(TokenKind.THINK)] * len(sampled.ids))
            summary, wrong = carried_over(self.renderer, sampled.ids)
            if wrong is not None:
                run.counters["broken_summaries"] += 1
                entry["error_kind"] = wrong
            run.log({**entry, "carried": summary})
        run.close(
            "summary" if summary is not None else "sliding", kind="summary" if summary is not None else "act"
        )
        session.renew()
        ids, new_kinds = next_context(
            self.renderer, windows, prompt, Window(left.builder, steps), result, summary, _state(run)
        )
        run.counters["windows"] += 1
        run.window = Window()
        run.made.clear()  # what the context before has shown is gone
        return ids, new_kinds

    async def _sample(self, run: _Run, session: TokenSession, new_ids: list[int], budget: int) -> Sampled:
        begun = time.perf_counter()
        try:
            return await session.sample(new_ids, replace(run.sampling, max_tokens=budget))
        finally:
            run.engine_s += time.perf_counter() - begun

    async def _act(self, run: _Run, parsed: Parsed, sandbox: Any) -> ToolResult:
        """Does what the turn says. Only a whole, parsed call reaches a tool."""
        action = parsed.action
        if isinstance(action, BrokenCall):
            run.counters["broken"] += 1
            return ToolResult(f"error: {action.message}", action.kind)
        if isinstance(action, Final):
            return ToolResult("", ends=True)
        call = (action.name, action.text())
        again = call in run.made
        begun = time.perf_counter()
        try:
            if again and self.limits.refuse_repeats:
                result = ToolResult(REPEATED, "repeated")
            else:
                result = await self.tools.run(action, sandbox)
        finally:
            run.tools_s += time.perf_counter() - begun
        known = action.name if action.name in self.tools.names else "unknown"
        counter = run.counters["tools"].setdefault(known, {"calls": 0, "errors": {}, "seconds": 0.0})
        counter["calls"] += 1
        counter["seconds"] += time.perf_counter() - begun
        run.counters["needless_reruns"] += again
        if result.todos is not None:  # the list is another one than the calls before have left
            run.made = {made for made in run.made if made[0] != action.name}
        if result.error_kind in _SAYS_THE_SAME:
            run.made.add(call)
        if result.edited is not None:
            run.made.clear()
            if result.edited not in run.edited:
                run.edited.append(result.edited)
        if result.todos is not None:
            run.todos = result.todos
        if result.error_kind is not None:
            counter["errors"][result.error_kind] = counter["errors"].get(result.error_kind, 0) + 1
        run.counters["broken"] += result.error_kind in ("unknown_tool", "invalid_arguments")
        return result

    def _render_result(self, text: str) -> tuple[list[int], list[int]]:
        """Renders a tool result; one over the limit keeps its head and says how much is missing."""
        ids, kinds = self.renderer.render_output(text)
        over = len(ids) - self.limits.max_output_tokens
        if over <= 0:
            return ids, kinds
        tokenizer = self.renderer.tokenizer
        marker_tokens = 24
        head = tokenizer.decode(
            tokenizer.encode(text)[: max(self.limits.max_output_tokens - marker_tokens, 0)]
        )
        head = head[: head.rfind("\n")] if "\n" in head else head.rstrip("\ufffd")
        missing = text.count("\n") - head.count("\n")
        return self.renderer.render_output(
            f"{head}\n[cut: {missing} more lines]" if missing else f"{head}[cut]"
        )


def _state(run: _Run) -> str:
    """What the next context is told whatever the model says: which one it is, what was changed, what is on the list."""
    edited = f", edited {' '.join(run.edited)}" if run.edited else ""
    todos = f"\ntodo {'; '.join(run.todos)}" if run.todos else ""
    return f"context {run.counters['windows'] + 1}{edited}{todos}"


def _readable(parsed: Parsed) -> dict[str, Any]:
    """The trace's view of a turn: ``call`` and ``tool``, ``final`` or ``broken``, and the thought if there is one."""
    entry: dict[str, Any] = {} if parsed.think is None else {"think": parsed.think}
    action = parsed.action
    if isinstance(action, Call):
        return {**entry, "call": action.text(), "tool": action.name}
    if isinstance(action, Final):
        return {**entry, "final": action.text}
    return {**entry, "broken": action.kind}


# Two runs with different loop code are different harnesses, whatever their configuration says.
HARNESS_DIGEST = hashlib.sha256(
    "".join(inspect.getsource(sys.modules[name]) for name in (__name__, Window.__module__)).encode()
).hexdigest()[:16]
