"""Bounds of a run, and how they travel with the model that was trained under them.

A policy learns to work within its limits: when its context ends, what a summary is asked for, how many turns it has.
Whoever serves or measures it elsewhere has to keep to them, so a model directory says what they were.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from cadenza.core.config import StrictConfig
from cadenza.core.errors import CorruptArtifact
from cadenza.core.files import read_json, write_json
from cadenza.harness.windows import WindowConfig

LIMITS_FILE = "agent.json"
FORMAT = 2  # 1: without the number, and with no call refused for being the same as before


class Limits(StrictConfig):
    """Bounds of one run. Tokens count the prompt, outputs and sampled turns alike.

    ``max_turns``: sampled turns, without summaries. ``max_run_tokens``: of all contexts together, copies, outputs and
    summaries included, so that runs with different windows can be given the same; 0: no bound.
    ``max_tokens_per_turn``: sampled tokens of one turn; a turn that is cut there ends
    the run. ``max_context_tokens``: of the whole context. ``refuse_repeats``: a call that was made before in the same
    context, with nothing edited since, is not made again and answered with an error. A model that has repeated itself
    is ever surer to do so again, and its runs would go round to the last turn. ``max_errors_in_a_row``: calls that one
    after another were broken, refused, repeated or without effect. ``wall_s``: seconds from the first turn to the last.
    ``windows``: what happens when a context grows long.
    """

    max_turns: int = Field(default=24, gt=0)
    max_run_tokens: int = Field(default=0, ge=0)
    max_tokens_per_turn: int = Field(default=192, gt=0)
    max_context_tokens: int = Field(default=1536, gt=0)
    max_output_tokens: int = Field(default=448, gt=0)  # of one tool result
    refuse_repeats: bool = True
    max_errors_in_a_row: int = Field(default=3, gt=0)
    wall_s: float = Field(default=60.0, gt=0)
    windows: WindowConfig = WindowConfig()

    @model_validator(mode="after")
    def _a_triggered_context_has_room(self) -> Limits:
        needed = self.windows.trigger + self.max_tokens_per_turn + self.max_output_tokens
        needed += self.windows.summary_tokens + 16 if self.windows.mode == "summary" else 0
        if self.windows.mode != "off" and needed > self.max_context_tokens:
            raise ValueError(
                f"windows.trigger leaves no room for one more turn, its result and the summary: {needed} tokens of "
                f"max_context_tokens = {self.max_context_tokens}"
            )
        return self


def save_limits(limits: Limits, directory: Path) -> None:
    """Beside the model. Raises ResourceExhausted: disk full."""
    write_json(directory / LIMITS_FILE, {"format": FORMAT, **limits.model_dump(mode="json")})


def limits_of(directory: Path) -> Limits | None:
    """Those that a model was trained under; None for one that no agent has trained. Raises CorruptArtifact."""
    path = directory / LIMITS_FILE
    if not path.is_file():
        return None
    try:
        body = read_json(path)
        if not isinstance(body, dict):
            raise TypeError("it is no table")
        written = body.pop("format", 1)
        if written not in (1, FORMAT):
            raise ValueError(f"its format is {written}, this Cadenza reads up to {FORMAT}")
        return Limits.model_validate({"refuse_repeats": False, **body} if written == 1 else body)
    except (ValueError, TypeError) as error:
        reason = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise CorruptArtifact(
            f"{path} does not hold the limits of an agent: {reason}", "restore the file"
        ) from None
