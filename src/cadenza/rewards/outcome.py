"""From a verdict and what the run cost to named rewards and one scalar.

Outcome: the score of the verdict, times ``solved``. Length: Composer 2, section 4.2, a concave penalty
``C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q))`` on a weighted sum ``x`` of tokens by kind, calls and turns, so that
the first tokens cost most on easy tasks and long work on hard ones stays affordable. Behaviours: broken calls, items
left open, calls repeated for nothing (same section: watched, and priced as needed).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.types import Segment, TokenKind, Verdict


class LengthPenalty(StrictConfig):
    """Weights of the length penalty.

    ``scale``: factor on the whole penalty, in units of reward; 0 turns it off. ``k``: how soon the penalty bends, per
    weighted token. ``q``: how strongly it bends: 0 a line, 1 the logarithm, above 1 it stays below
    ``scale / (k (q - 1))`` however long a run is, so that long work on a hard task is hardly dearer for being longer.
    ``think``: weight of a token of a thought or a summary; ``call``: weight of a token of a call; ``output``: weight of
    a token of what a tool answered; ``final``: weight of a token of a closing message. ``per_call``: what one call of a
    tool adds to the weighted tokens, whatever its length; ``per_turn``: what one turn adds, a summary too.
    ``solved_only``: only runs that solve their task wholly pay. Where failed ones do, too, giving up early is cheaper
    than another attempt that may fail (Arora and Zanette 2025, "Training Language Models to Reason Efficiently":
    the price is on correct answers).
    """

    scale: float = 0.0
    k: float = Field(default=0.01, gt=0)
    q: float = Field(default=0.5, ge=0)
    think: float = 1.0
    call: float = 1.0
    output: float = 0.25
    final: float = 1.0
    per_call: float = 0.0
    per_turn: float = 0.0
    solved_only: bool = False


# Of harness.tools.ERROR_KINDS neither what `broken` and `needless_rerun` count nor the environment's own faults.
CallError = Literal["not_found", "refused", "no_effect", "timeout"]


class RewardConfig(StrictConfig):
    """What a rollout is worth.

    ``solved``: the outcome for a score of 1. ``failed``: for a score of 0; what lies between follows the score.
    ``unfinished``: factor on the outcome of a run that did not end by itself (cut turn, full context, too many turns):
    its patch is graded, and 1.0 means the patch alone counts. ``failures``: the outcome for a verdict that is the
    model's own failure, by kind; a kind that is not listed is worth ``failed``. ``broken_call``: for each call that
    could not be read or does not fit its tool; ``call_errors``: for each call that a tool answered with an error, by
    kind (``{ no_effect = -0.05 }``). ``false_finish``: for a run that ends itself with its task not wholly solved. All
    are negative to discourage. They tell apart the runs of a group that never solves its task, which the outcome alone
    does not. Where only failed calls cost something, giving up is the cheapest way to fail; where a false finish does,
    never finishing is, unless ``unfinished`` is below 1. ``open_todo``: for each item that the run leaves open on its
    own list. ``needless_rerun``: for each call that was made before in the same context, with nothing edited since.
    Composer 2, section 4.2: such behaviours are watched during RL, and priced when they show. ``length``: the price of
    length.
    """

    solved: float = 1.0
    failed: float = 0.0
    unfinished: float = 1.0
    broken_call: float = 0.0
    call_errors: dict[CallError, float] = {}
    false_finish: float = 0.0
    open_todo: float = 0.0
    needless_rerun: float = 0.0
    failures: dict[str, float] = {}
    length: LengthPenalty = LengthPenalty()


def reward(
    verdict: Verdict,
    segments: Sequence[Segment],
    trace: Sequence[dict[str, Any]],
    finish_reason: str,
    config: RewardConfig,
) -> tuple[dict[str, float], float | None]:
    """Named rewards and their sum; ``({}, None)`` when the verdict is a failure that is not the model's own.

    An infrastructure failure never becomes a number (invariant 5). Raises ValueError on a sum that is not
    finite, which only a config with infinite weights can cause.
    """
    if verdict.failure is not None and not verdict.failure.counts:
        return {}, None
    if verdict.failure is not None:
        outcome = config.failures.get(verdict.failure.kind, config.failed)
    else:
        assert verdict.score is not None
        outcome = config.failed + (config.solved - config.failed) * verdict.score
    if finish_reason != "finish":
        outcome = config.failed + (outcome - config.failed) * config.unfinished
    rewards = {"outcome": outcome}
    if config.false_finish and finish_reason == "finish" and verdict.score != 1.0:
        rewards["false_finish"] = config.false_finish
    for name, worth, counter in (
        ("broken_calls", config.broken_call, "broken"),
        ("open_todos", config.open_todo, "open_todos"),
        ("needless_reruns", config.needless_rerun, "needless_reruns"),
    ):
        if worth:
            rewards[name] = worth * summary_of(trace).get(counter, 0)
    if config.call_errors:
        tools = summary_of(trace).get("tools", {}).values()
        errors = Counter[str]()
        for tool in tools:
            errors.update(tool.get("errors", {}))
        rewards["call_errors"] = sum(
            (worth * errors[kind] for kind, worth in config.call_errors.items()), 0.0
        )
    if config.length.scale and (verdict.score == 1.0 or not config.length.solved_only):
        rewards["length"] = -config.length.scale * length_cost(segments, trace, config.length)
    total = float(sum(rewards.values()))
    if not math.isfinite(total):
        raise ValueError(f"the reward is not finite: {rewards}")
    return rewards, total


def length_cost(segments: Sequence[Segment], trace: Sequence[dict[str, Any]], config: LengthPenalty) -> float:
    """``C(x)`` of a run; 0 for an empty one, increasing in x, in the units of x near 0."""
    kinds = np.zeros(len(TokenKind), np.int64)
    for segment in segments:
        kinds += np.bincount(segment.token_kind_T, minlength=len(TokenKind))
    calls = sum(tool["calls"] for tool in summary_of(trace).get("tools", {}).values())
    x = (
        config.think * kinds[TokenKind.THINK]
        + config.call * kinds[TokenKind.CALL]
        + config.output * kinds[TokenKind.OUTPUT]
        + config.final * kinds[TokenKind.FINAL]
        + config.per_call * calls
        + config.per_turn * sum(len(segment.turns) for segment in segments)
    )
    growth = math.log1p(config.k * float(x))
    p = 1.0 - config.q
    # expm1 keeps the digits that (1 + kx)^p - 1 loses for q close to 1, where the cost becomes the logarithm.
    return (math.expm1(p * growth) / p if p else growth) / config.k


def summary_of(trace: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counters that a run's trace ends with; empty for one that has none."""
    return next((entry["summary"] for entry in reversed(trace) if "summary" in entry), {})
