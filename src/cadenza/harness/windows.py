"""What happens when a context grows long: the run goes on in another one.

With ``summary`` the harness appends a short query to the same context, so that what the engine has cached is used once
more; the model thinks, writes what it wants to carry over, and goes on with task, summary, state and its last steps
(Cursor, "Training Composer for longer horizons": a fixed trigger in tokens; what to keep is learned, since the final
reward counts for every token of the chain). ``sliding`` is what there is without: the oldest steps are forgotten. A
step is a sampled turn and the result it got.

Every context is one segment. Copies of a summary and of steps are given there, not sampled: nobody is rewarded twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.types import TokenKind
from cadenza.harness.segment import SegmentBuilder
from cadenza.tokens import BrokenCall, CompactRenderer


class WindowConfig(StrictConfig):
    """``mode``: off (a full context ends the run), summary, or sliding. ``trigger``: tokens of a context at which the
    run goes on in the next. ``summary_tokens``: most tokens of a summary and the thought before it; one that is cut or
    broken carries nothing over. ``kept_steps``: last steps that are copied, as many of them as leave the next context
    at most half full, and the very last one if it fits at all; ``sliding`` copies all of which that is true. ``most``:
    contexts of one run."""

    mode: Literal["off", "summary", "sliding"] = "off"
    trigger: int = Field(default=768, gt=0)
    summary_tokens: int = Field(default=128, gt=0)
    kept_steps: int = Field(default=2, ge=0)
    most: int = Field(default=8, gt=0)


@dataclass
class Window:
    """The present context of a run. ``steps``: (start, end) of each in the builder, which lacks the last result yet."""

    builder: SegmentBuilder = field(default_factory=SegmentBuilder)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def step_taken(self, start: int) -> None:
        """A turn was sampled, beginning at ``start``; what came before it belongs to the step before."""
        if self.steps:
            first, _ = self.steps[-1]
            self.steps[-1] = (first, start)
        self.steps.append((start, len(self.builder)))


def next_context(
    renderer: CompactRenderer,
    config: WindowConfig,
    prompt: list[int],
    window: Window,
    result: list[int],
    summary: str | None,
    state: str,
) -> tuple[list[int], list[int]]:
    """Ids and kinds (all OTHER) that the next context begins with: prompt, summary, state, the last steps.

    Args:
        result: of the last step, rendered, which the window does not hold yet.
        summary: None where there is none to carry over.
        state: what the harness knows whatever the model says.
    """
    head = list(prompt)
    if summary is not None:
        head += renderer.render_summary(summary)[0]
    head += renderer.render_note(state)[0]
    tail: list[int] = []
    count = config.kept_steps if config.mode == "summary" else len(window.steps)
    for i, (start, end) in enumerate(reversed(window.steps[len(window.steps) - count :])):
        step = window.builder.cut(start, end) + (result if i == 0 else [])
        # What was asked for last is what the next turn is about: without it the run would ask again and again.
        most = config.trigger - 1 if i == 0 else config.trigger // 2
        if len(head) + len(step) + len(tail) > most:
            break
        tail = step + tail
    ids = head + tail
    return ids, [int(TokenKind.OTHER)] * len(ids)


def carried_over(renderer: CompactRenderer, sampled_ids: list[int]) -> tuple[str, str | None]:
    """(the summary's text, what is wrong with it). One that is broken carries nothing over."""
    parsed = renderer.parse_summary(sampled_ids)
    return ("", parsed.kind) if isinstance(parsed, BrokenCall) else (parsed.text, None)
