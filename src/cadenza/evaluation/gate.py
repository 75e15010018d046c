"""The gate: whether a candidate may take the place of the policy that is served, and why not.

Both are evaluated on the same tasks, seeds and harness. A candidate is promoted only if every check passes, so each is
built to answer "is there a loss?" and not "is there a gain?": with few tasks a gain cannot be shown, and a candidate
that is no worse may ship. What cannot be computed is a check that fails, never one that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.etree import ElementTree

import numpy as np
from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.evaluation.charts import signed
from cadenza.evaluation.result import EvalResult, TaskFacts
from cadenza.evaluation.statistics import (
    VALID_FLOOR,
    Estimate,
    Outcomes,
    least_shown,
    non_inferiority,
    paired_change,
    tasks_for,
    tokens_per_solved,
)


class GateConfig(StrictConfig):
    """What may be lost. Shares: 0.05 is five points.

    ``margin``: the lower end of the 95% interval of the change of pass@1 lies above minus this. So an equal candidate
    passes only if the interval's half width is well below the margin: about 4 points at 100 tasks with 8 samples each.
    Where there are so few tasks that even the same outcomes would be refused, the decision says how many it takes.
    ``slices``: fields of a task; a slice fails when it lost more than ``slice_margin`` *and* its interval lies below
    zero: with few tasks the first alone is noise. Greedy decoding, one attempt a task, is judged like a slice, by
    ``greedy_margin``. Slices of under ``slice_tasks`` tasks are not judged. ``token_margin``: by how much the tokens
    spent per solve may grow. ``must_pass``: ids of tasks that it has to solve at least once. ``valid_floor``: share of
    rollouts that need a verdict.
    """

    margin: float = Field(default=0.05, ge=0)
    greedy_margin: float = Field(default=0.08, ge=0)
    slices: tuple[str, ...] = ("ambiguity", "edits", "unseen")
    slice_margin: float = Field(default=0.1, ge=0)
    slice_tasks: int = Field(default=15, ge=1)
    token_margin: float = Field(default=0.5, ge=0)
    must_pass: tuple[str, ...] = ()
    valid_floor: float = Field(default=VALID_FLOOR, ge=0, le=1)


class Check(StrictConfig):
    """One question and its answer. ``detail`` is a sentence with the numbers."""

    name: str
    passed: bool
    detail: str


class Decision(StrictConfig):
    """``promote`` iff every check passed. ``baseline`` "": nothing was served before."""

    format_version: int = 1
    candidate: str
    baseline: str
    promote: bool
    checks: tuple[Check, ...]

    def reasons(self) -> list[str]:
        """The details of the checks that failed."""
        return [check.detail for check in self.checks if not check.passed]

    def junit(self) -> str:
        """JUnit XML, one test case a check, for CI."""
        suite = ElementTree.Element(
            "testsuite", name="gate", tests=str(len(self.checks)), failures=str(len(self.reasons()))
        )
        for check in self.checks:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"gate.{self.candidate}", name=check.name
            )
            if not check.passed:
                ElementTree.SubElement(case, "failure", message=check.detail)
        return ElementTree.tostring(suite, encoding="unicode") + "\n"


def decide(
    candidate: Sequence[EvalResult], baseline: Sequence[EvalResult], config: GateConfig | None = None
) -> Decision:
    """Compares the candidate with what is served, an empty ``baseline`` when nothing is.

    Raises:
        ValueError: no result of the candidate.
    """
    if not candidate:
        raise ValueError("a gate needs a result of the candidate")
    config = config or GateConfig()
    new, old = _Side(candidate), _Side(baseline)
    checks = [_valid("candidate", new, config), *_must_pass(new, config)]
    if baseline:
        checks += [_valid("baseline", old, config), _alike(new, old)]
        if all(check.passed for check in checks if check.name != "must_pass"):
            checks += [_no_worse(new, old, config), *_slices(new, old, config), _tokens(new, old, config)]
    return Decision(
        candidate=candidate[0].policy,
        baseline=baseline[0].policy if baseline else "",
        promote=all(check.passed for check in checks),
        checks=tuple(checks),
    )


class _Side:
    """The results of one policy by suite, seed and kind of decoding."""

    def __init__(self, results: Sequence[EvalResult]) -> None:
        self.slots = {(r.suite, r.seed, r.temperature == 0.0): r for r in results}

    def outcomes(self, greedy: bool, where: Callable[[TaskFacts], bool] = lambda _: True) -> list[Outcomes]:
        """One matrix a suite and seed, in an order that is the same for both sides."""
        found = [r.outcomes(where) for key, r in sorted(self.slots.items()) if key[2] == greedy]
        return [o for o in found if o.task_ids]


def _valid(name: str, side: _Side, config: GateConfig) -> Check:
    worst = max(r.outcomes().invalid_share for r in side.slots.values())
    return Check(
        name=f"{name}_valid",
        passed=1.0 - worst >= config.valid_floor,
        detail=f"{worst:.1%} of the {name}'s rollouts have no verdict (at most {1 - config.valid_floor:.1%} may)",
    )


def _must_pass(side: _Side, config: GateConfig) -> list[Check]:
    if not config.must_pass:
        return []
    solved = {r.task_id for result in side.slots.values() for r in result.records if r.solved}
    missing = [task for task in config.must_pass if task not in solved]
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return [
        Check(
            name="must_pass",
            passed=not missing,
            detail=f"not solved once: {shown}" if missing else f"all {len(config.must_pass)} solved",
        )
    ]


def _alike(new: _Side, old: _Side) -> Check:
    """Scores compare only on the same tasks under the same harness."""
    reason = ""
    if new.slots.keys() != old.slots.keys():
        reason = "the two were not evaluated on the same suites, seeds and ways of decoding"
    else:
        for key, result in new.slots.items():
            other = old.slots[key]
            if result.suite_digest != other.suite_digest or result.samples != other.samples:
                reason = f"the two were evaluated on other tasks or samples of {result.suite}"
            elif result.harness_digest != other.harness_digest:
                reason = "the two were evaluated with different harnesses"
    return Check(name="comparable", passed=not reason, detail=reason or "same tasks, samples and harness")


def _no_worse(new: _Side, old: _Side, config: GateConfig) -> Check:
    """Of sampled decoding, or of greedy where nothing else was measured."""
    greedy = not new.outcomes(False)
    change = paired_change(new.outcomes(greedy), old.outcomes(greedy))
    bar = f"the lower end has to lie above {signed(-100 * config.margin)}"
    return Check(
        name="pass@1",
        passed=non_inferiority(change, config.margin).holds,
        detail=f"pass@1 changed by {_shown(change)} ({bar}){_too_few(change, config.margin)}",
    )


def _too_few(change: Estimate, margin: float) -> str:
    """Says that so few tasks refuse even the same outcomes, and how many would not; "" where there are enough."""
    least = least_shown(change.n_tasks, change.level)
    if least < margin:
        return ""
    enough = (
        f"needs {tasks_for(margin, change.level)} tasks or more" if margin > 0 else "is shown by no number"
    )
    return (
        f"; {change.n_tasks} tasks cannot show less than {100 * least:.1f} points, so that even the same outcomes "
        f"would be refused: margin {100 * margin:g} {enough}"
    )


def _slices(new: _Side, old: _Side, config: GateConfig) -> list[Check]:
    """What may lose in silence while the mean holds: greedy decoding, and kinds of tasks."""
    checks = []
    if new.outcomes(True) and new.outcomes(False):
        change = paired_change(new.outcomes(True), old.outcomes(True))
        checks.append(_no_certain_loss("greedy", "greedy decoding", change, config.greedy_margin))
    facts = [f for r in new.slots.values() for f in r.tasks.values()]
    for by in config.slices:
        for value in sorted({getattr(f, by) for f in facts}):
            sides = [s.outcomes(False, lambda f, by=by, v=value: getattr(f, by) == v) for s in (new, old)]
            if len({t for o in sides[0] for t in o.task_ids}) >= config.slice_tasks:
                change = paired_change(*sides)
                checks.append(
                    _no_certain_loss(f"{by}={value}", f"tasks with {by} {value}", change, config.slice_margin)
                )
    return checks


def _no_certain_loss(name: str, what: str, change: Estimate, margin: float) -> Check:
    return Check(
        name=name,
        passed=not (change.value < -margin and change.high < 0),
        detail=f"{what}: {_shown(change)} (a loss of over {100 * margin:g} may not be certain)",
    )


def _shown(change: Estimate) -> str:
    value, low, high = change.points()
    return f"{signed(value)} points [{signed(low)}, {signed(high)}] on {change.n_tasks} tasks"


def _tokens(new: _Side, old: _Side, config: GateConfig) -> Check:
    spent = []
    for side in (new, old):
        outcomes = side.outcomes(False) or side.outcomes(True)
        solved = [tokens_per_solved(o) for o in outcomes]
        tokens = sum(float(np.nansum(o.tokens_NS[np.isfinite(o.solved_NS)])) for o in outcomes)
        count = sum(s.solved for s in solved)
        spent.append(tokens / count if count else None)
    if spent[1] is None:
        return Check(name="tokens", passed=True, detail="the baseline solved nothing that could cost tokens")
    if spent[0] is None:
        return Check(name="tokens", passed=False, detail="the candidate solved nothing")
    growth = spent[0] / spent[1] - 1.0
    return Check(
        name="tokens",
        passed=growth <= config.token_margin,
        detail=f"{spent[0]:.0f} tokens spent per solve, {spent[1]:.0f} before: {growth:+.0%} "
        f"(at most {config.token_margin:+.0%})",
    )
