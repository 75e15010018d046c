"""Generated repair tasks: draw a repository, plant verified bugs, write visible and hidden tests and an issue.

The algorithm, from top to bottom: ``planted_tasks`` draws plans, screens them by running (``screen.py``), and turns
each plan whose bugs the calls reveal into the files of a task. ``generate_split`` writes Harbor task directories.
Everything follows from ``GeneratorConfig``: same config, same bytes.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from cadenza.core.config import StrictConfig
from cadenza.core.errors import ConfigError
from cadenza.core.types import Task
from cadenza.tasks.bugs import ALL_FAMILIES, DEMO_FAMILIES, UNSEEN_FAMILIES
from cadenza.tasks.directory import TaskFiles, load_tasks, write_split
from cadenza.tasks.draft import lit
from cadenza.tasks.issues import LISTED, REPORTS, Symptom, issue_text, leaks, pointer_text, reports_text
from cadenza.tasks.modules import MAX_LINES, names_of_tests, source_of_tests
from cadenza.tasks.partition import PARTITION
from cadenza.tasks.patch import make_patch
from cadenza.tasks.plan import Plan, PlannedCall, draw_plan
from cadenza.tasks.screen import ENDLESS, Observation, Screened, screen
from cadenza.tasks.words import spoken

_BATCH = 48
_REPORTED_BUGS = 3
_LONGEST_REPORTED = 16  # lines of a file beside a list of reports: the list is the long read
_LONGEST_REPORTS = 700  # characters: what an agent reads in one call

__all__ = ["GeneratorConfig", "SplitConfig", "draw_tasks", "generate_split", "load_tasks", "planted_tasks"]


class SplitConfig(StrictConfig):
    """What one split holds.

    ``count``: tasks. ``two_edit_share``: of the tasks (0..1) that need two edits. ``max_modules``: files with code in a
    repository at most. ``reports_share``: of the tasks (0..1) whose issue only points to ``reports.md``, users' reports
    about three bugs, each in a file of its own and with two examples. No visible test fails in these: the list has to
    be remembered, or read again.
    """

    count: int = Field(gt=0)
    families: tuple[str, ...] = ()  # none: all that a split of this name may use
    two_edit_share: float = Field(default=0.0, ge=0, le=1)
    unseen_share: float = Field(default=0.0, ge=0, le=1)  # of the bugs; 0: at par with the other families
    two_files: bool = False  # two edits always in two files; otherwise half of the two-edit tasks are
    max_modules: int = Field(default=6, ge=1, le=6)
    reports_share: float = Field(default=0.0, ge=0, le=1)
    levels: tuple[float, float, float] = (0.4, 0.35, 0.25)  # shares of the ambiguity levels 0, 1, 2


def _seen() -> tuple[str, ...]:
    return tuple(f for f in ALL_FAMILIES if f not in UNSEEN_FAMILIES)


def _splits() -> dict[str, SplitConfig]:
    return {
        "demo": SplitConfig(count=2000, families=DEMO_FAMILIES),
        "train": SplitConfig(count=6000, families=_seen(), two_edit_share=0.2),
        "val": SplitConfig(count=200, families=_seen(), two_edit_share=0.2),
        "heldout": SplitConfig(count=400, families=ALL_FAMILIES, unseen_share=0.25),
        "heldout_hard": SplitConfig(
            count=200, families=ALL_FAMILIES, unseen_share=0.25, two_edit_share=1.0, two_files=True
        ),
    }


class GeneratorConfig(StrictConfig):
    """Seed, splits and family lists of a generated task set.

    ``unseen_families``: bug families that only held-out splits may use. ``splits``: by name; ``demo``, ``train`` and
    ``val`` never hold a task of an unseen family.

    Raises (from validation):
        ValueError: an unknown split or family, or an unseen family in a split that trains.
    """

    seed: int = 0
    created_at: str = "2026-01-01T00:00:00+00:00"  # fixed, so that the same config gives the same bytes
    unseen_families: tuple[str, ...] = UNSEEN_FAMILIES
    splits: dict[str, SplitConfig] = Field(default_factory=_splits)

    @model_validator(mode="before")
    @classmethod
    def _fill_families(cls, values: Any) -> Any:
        """Gives every split without families those its name allows."""
        if not isinstance(values, dict) or not isinstance(values.get("splits"), dict):
            return values
        unseen = values.get("unseen_families", UNSEEN_FAMILIES)
        filled = {}
        for name, split in values["splits"].items():
            if isinstance(split, dict) and not split.get("families"):
                allowed = DEMO_FAMILIES if name == "demo" else ALL_FAMILIES
                split = {
                    **split,
                    "families": tuple(f for f in allowed if name.startswith("heldout") or f not in unseen),
                }
            filled[name] = split
        return {**values, "splits": filled}

    @model_validator(mode="after")
    def _check(self) -> GeneratorConfig:
        for name, split in self.splits.items():
            if name not in PARTITION or name == "corpus":
                raise ValueError(f"unknown split {name!r}")
            if bad := [f for f in split.families if f not in ALL_FAMILIES]:
                raise ValueError(f"unknown bug families in split {name}: {', '.join(bad)}")
            if split.reports_share and split.max_modules < _REPORTED_BUGS:
                raise ValueError(
                    f"split {name}: reports are about {_REPORTED_BUGS} files, max_modules is less"
                )
            if not split.families:
                raise ValueError(f"split {name} has no families")
            if not name.startswith("heldout") and (bad := set(split.families) & set(self.unseen_families)):
                raise ValueError(f"split {name} would train on unseen families: {', '.join(sorted(bad))}")
        return self


def generate_split(config: GeneratorConfig, split: str, out_dir: Path) -> list[Task]:
    """Writes the split's tasks under ``out_dir`` (one directory each, and a manifest) and returns them.

    Raises:
        ConfigError: the config has no such split, or ``out_dir`` holds something else.
    """
    if split not in config.splits:
        raise ConfigError(
            f"no split {split!r} in the generator config", f"one of: {', '.join(config.splits)}"
        )
    files = islice(planted_tasks(config, split), config.splits[split].count)
    return write_split(files, split, out_dir, digest=_config_digest(config, split))


def _config_digest(config: GeneratorConfig, split: str) -> str:
    settings = config.splits[split].model_dump_json()
    text = f"{config.seed} {config.created_at} {config.unseen_families} {settings}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def planted_tasks(config: GeneratorConfig, split: str) -> Iterator[TaskFiles]:
    """Endless screened tasks of a split, in a fixed order, no buggy function twice."""
    settings = config.splits[split]
    used: set[str] = set()
    made = _Made(settings.reports_share, dict.fromkeys(settings.families, 0))
    start = 0
    while True:
        drawn = [(i, _candidate(config, split, made, i)) for i in range(start, start + _BATCH)]
        start += _BATCH
        drafts = [(i, drawn) for i, drawn in drawn if drawn]
        screened = screen([drawn.plan.probe() for _, drawn in drafts])
        for (i, drawn), result in zip(drafts, screened, strict=True):
            rng = random.Random(f"{config.seed}/{split}/{i}/build")
            keys = {_buggy_key(drawn.plan, b) for b in range(len(drawn.plan.bugs))}
            if result is None or keys & used:
                continue
            if files := _build(drawn, result, split, config.created_at, rng):
                used |= keys
                made.hold(drawn, files)
            while ready := made.take():
                yield ready


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A plan and how its bugs are told: in the issue, at an ambiguity level, or one by one in ``REPORTS``."""

    plan: Plan
    level: int
    reports: bool


@dataclass(slots=True)
class _Made:
    """Tasks so far. ``families``: by bug. ``taken`` of them went out, in an order in which every stretch has its share
    of tasks with reports; the others are held until it is their turn."""

    share: float
    families: dict[str, int]
    taken: int = 0
    held: dict[bool, deque[TaskFiles]] = field(default_factory=lambda: {True: deque(), False: deque()})

    def hold(self, candidate: _Candidate, files: TaskFiles) -> None:
        for bug in candidate.plan.bugs:
            self.families[bug.mutation.family] += 1
        self.held[candidate.reports].append(files)

    def take(self) -> TaskFiles | None:
        """The next task, if there is one of the kind whose turn it is."""
        before, after = (math.floor(n * self.share + 1e-9) for n in (self.taken, self.taken + 1))
        held = self.held[after > before]
        if not held:
            return None
        self.taken += 1
        return held.popleft()

    def chance_of_reports(self) -> float:
        """Of the next candidate. High until one is to spare: three bugs at once rarely survive screening."""
        if self.share in (0.0, 1.0):
            return self.share
        return 0.1 if len(self.held[True]) > len(self.held[False]) else 0.9


def _candidate(config: GeneratorConfig, split: str, made: _Made, index: int) -> _Candidate | None:
    settings = config.splits[split]
    rng = random.Random(f"{config.seed}/{split}/{index}")
    chance = made.chance_of_reports()
    # Without reports nothing is drawn: splits that have none stay as they are.
    reports = chance > 0 and rng.random() < chance
    if reports:
        edits = _REPORTED_BUGS
    else:
        edits = 2 if rng.random() < settings.two_edit_share else 1
    families = tuple(_family(config, settings, made.families, rng) for _ in range(edits))
    apart = reports or (edits == 2 and (settings.two_files or rng.random() < 0.5))
    level = LISTED if reports else rng.choices((0, 1, 2), settings.levels)[0]
    low = edits if apart else 1
    modules = max(low, min(rng.choice((5, 6) if reports else (1, 2, 2, 3, 3, 4, 5, 6)), settings.max_modules))
    most_lines = _LONGEST_REPORTED if reports else MAX_LINES
    plan = draw_plan(rng, split, families, modules, apart, most_lines)
    return _Candidate(plan, level, reports) if plan else None


def _family(
    config: GeneratorConfig, settings: SplitConfig, accepted: dict[str, int], rng: random.Random
) -> str:
    """Likely one with few tasks so far: families differ widely in how many of their mutants survive screening."""
    unseen = [f for f in settings.families if f in config.unseen_families]
    if settings.unseen_share and unseen:
        pool = (
            unseen
            if rng.random() < settings.unseen_share
            else [f for f in settings.families if f not in unseen]
        )
    else:
        pool = list(settings.families)
    least = min(accepted[f] for f in pool)
    return rng.choices(pool, [1 / (1 + accepted[f] - least) for f in pool])[0]


def _buggy_key(plan: Plan, bug: int) -> str:
    b = plan.bugs[bug]
    return "\n".join(b.mutation.apply(plan.modules[b.module].drafts[b.draft].lines))


@dataclass(frozen=True, slots=True)
class _Case:
    """A call with what it does: ``killed``: indices of the bugs that alone break it; ``fails`` with all of them."""

    planned: PlannedCall
    seen: Observation
    killed: frozenset[int]

    @property
    def fails(self) -> bool:
        return self.seen.actual[0] is not None

    @property
    def size(self) -> int:
        return sum(map(len, self.planned.call.setup)) + len(self.planned.call.expression)


def _cases(plan: Plan, screened: Screened) -> list[_Case]:
    out = []
    for planned, seen in zip(plan.calls, screened.calls, strict=True):
        if seen is None:
            continue
        alone = seen.actual[1:] if len(plan.bugs) > 1 else seen.actual
        if ENDLESS in seen.actual:
            return []  # a mutant that loops for ever would cost every rollout its time limit
        out.append(_Case(planned, seen, frozenset(i for i, a in enumerate(alone) if a is not None)))
    return out


def _build(
    drawn: _Candidate, screened: Screened, split: str, created_at: str, rng: random.Random
) -> TaskFiles | None:
    """The files of a task, or None if the calls do not reveal every bug twice with different inputs."""
    plan = drawn.plan
    cases = _cases(plan, screened)
    chosen = _choose(plan, cases, rng)
    if chosen is None:
        return None
    visible, hidden, shown = chosen
    if drawn.reports:  # a test that fails would say what is left to do
        targets = {(b.module, b.draft) for b in plan.bugs}
        visible = [c for c in visible if (c.planned.module, c.planned.draft) not in targets and not c.fails]
        if not visible:
            return None
        # Not all of them: what no test touches would be what is wrong.
        visible = [c for c in visible if rng.random() < 0.5] or visible[:1]
    good = {f"{name}.py": text.encode() for name, text in plan.sources(()).items()}
    bad = {f"{name}.py": text.encode() for name, text in plan.sources(plan.bugs).items()}
    tests, hidden_tests, expected = {}, {}, []
    for i, module in enumerate(plan.modules):
        for cases_of, target, path in (
            (visible, tests, f"test_{module.name}.py"),
            (hidden, hidden_tests, f"test_hidden_{module.name}.py"),
        ):
            if rows := [_row(plan, c) for c in cases_of if c.planned.module == i]:
                target[path] = source_of_tests(module.name, rows).encode()
                expected += [f"{path}::{name}" for name in names_of_tests(rows)]
    told = _told(drawn, [c for c in cases if c not in hidden], [_symptom(plan, c) for c in shown], rng)
    if told is None:
        return None
    text, listed = told
    metadata = {
        "split": split,
        "ambiguity": drawn.level,
        "families": [b.mutation.family for b in plan.bugs],
        "edits": len(plan.bugs),
        **({"reports": True} if drawn.reports else {}),
        "files": len(plan.modules),
        "buggy_files": sorted({plan.modules[b.module].path for b in plan.bugs}),
        "archetypes": [plan.modules[b.module].drafts[b.draft].archetype for b in plan.bugs],
        "created_at": created_at,
        "expected_tests": expected,
    }
    patch = make_patch(bad, {path: data for path, data in good.items() if bad[path] != data})
    return TaskFiles(text + "\n", {**bad, **tests, **listed}, hidden_tests, patch, metadata)


def _told(
    drawn: _Candidate, cases: list[_Case], symptoms: list[Symptom], rng: random.Random
) -> tuple[str, dict[str, bytes]] | None:
    """The issue, and the file of reports if it points to one; None where it says too much or a list is too long.
    ``cases``: those that no hidden test has."""
    if drawn.reports:
        seconds = _second_symptoms(drawn.plan, cases, symptoms)
        if seconds is None:
            return None
        listed = reports_text(list(zip(symptoms, seconds, strict=True)), rng)
        return (pointer_text(rng), {REPORTS: listed.encode()}) if len(listed) <= _LONGEST_REPORTS else None
    text = issue_text(symptoms, drawn.level, rng)
    said = leaks(text, drawn.level, [s.name for s in symptoms], [s.purpose for s in symptoms])
    return None if said else (text, {})


def _second_symptoms(plan: Plan, cases: list[_Case], symptoms: list[Symptom]) -> list[Symptom] | None:
    """Another call for each bug that it breaks, the shortest there is; None if a bug has none."""
    found = []
    for i, (bug, first) in enumerate(zip(plan.bugs, symptoms, strict=True)):
        own = [c for c in cases if (c.planned.module, c.planned.draft) == (bug.module, bug.draft)]
        others = [_symptom(plan, c) for c in sorted(own, key=lambda c: c.size) if i in c.killed and c.fails]
        other = next((s for s in others if s.call != first.call), None)
        if other is None:
            return None
        found.append(other)
    return found


def _row(plan: Plan, case: _Case):
    return (
        plan.modules[case.planned.module].drafts[case.planned.draft].name,
        case.planned.call,
        case.seen.value,
    )


def _choose(
    plan: Plan, cases: list[_Case], rng: random.Random
) -> tuple[list[_Case], list[_Case], list[_Case]] | None:
    """(visible, hidden, one shown symptom per bug); visible and hidden inputs differ."""
    visible: list[_Case] = []
    hidden: list[_Case] = []
    shown: list[_Case] = []
    spare: list[_Case] = []
    for i, bug in enumerate(plan.bugs):
        own = [c for c in cases if (c.planned.module, c.planned.draft) == (bug.module, bug.draft)]
        killing = [c for c in own if i in c.killed and c.fails]
        if len(killing) < 2:
            return None
        rng.shuffle(killing)
        first = min(killing[:3], key=lambda c: c.size)  # a short call makes a short issue and a short failure
        killing.remove(first)
        passing = [c for c in own if not c.fails]
        visible += [first, *passing[: rng.choice((0, 1))], *killing[2 : rng.choice((2, 3))]]
        hidden += [*killing[: rng.choice((1, 2))], *passing[1 : rng.choice((2, 3))]]
        shown.append(first)
        spare += [*passing[3:5], *killing[3:5]]
    targets = {(b.module, b.draft) for b in plan.bugs}
    for i, module in enumerate(plan.modules):
        others = [c for c in cases if c.planned.module == i and (i, c.planned.draft) not in targets]
        rng.shuffle(others)
        buggy = any(b.module == i for b in plan.bugs)
        if i in plan.tested:
            visible += others[: rng.choice((1, 2)) if buggy or len(module.drafts) == 1 else 2]
        if buggy:
            hidden += others[2:4]
    hidden += spare[: max(0, 3 - len(hidden))]
    if len(hidden) < 3 or len(visible) < 2:
        return None
    return _trimmed(visible, shown, 4 * len(plan.modules)), hidden, shown


def _trimmed(visible: list[_Case], shown: list[_Case], most: int) -> list[_Case]:
    return visible if len(visible) <= most else [*shown, *[c for c in visible if c not in shown]][:most]


def _symptom(plan: Plan, case: _Case) -> Symptom:
    module = plan.modules[case.planned.module]
    draft = module.drafts[case.planned.draft]
    call = case.planned.call
    actual = case.seen.actual[0]
    assert actual is not None
    return Symptom(
        draft.name,
        draft.purpose,
        "; ".join((*call.setup, call.expression)),
        lit(case.seen.value),
        actual,
        module.path,
        spoken(module.theme.name),
    )


def draw_tasks(config: GeneratorConfig, split: str, count: int) -> Sequence[TaskFiles]:
    """The first ``count`` tasks of a split, in memory."""
    return list(islice(planted_tasks(config, split), count))
