"""The report of a run: report.json for programs, report.html for people, and the same in a terminal.

It states what was measured, and just as plainly what was not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cadenza.core.errors import ConfigError
from cadenza.evaluation.charts import Strip, strip
from cadenza.evaluation.comparison import Change, Comparison, Row, compare, label, ordered
from cadenza.evaluation.report_charts import (
    STAGE_TITLES,
    Chart,
    PositionTable,
    plain_chart,
    position_table,
    stage_charts,
)
from cadenza.evaluation.report_headline import Headline, headline, untrained
from cadenza.evaluation.report_inputs import (
    DecisionRecord,
    RunInfo,
    RunInputs,
    Span,
    Trajectory,
    now_iso,
    read_run,
)
from cadenza.evaluation.report_round import Round, rounds
from cadenza.evaluation.result import EvalResult, write_text
from cadenza.evaluation.statistics import pass_at_k

FORMAT_VERSION = 1
TIMELINE_WINDOW_S = 40.0
LANES = ("trainer", "engine", "environment", "weights")
EXPECTED_STAGES = ("cpt", "sft", "rl")
MAX_EXAMPLES = 3


@dataclass(frozen=True)
class StageSection:
    """Charts of one stage; ``more``: metrics without a described chart; ``positions``: perplexity by position."""

    stage: str
    title: str
    charts: list[Chart]
    more: list[Chart]
    positions: PositionTable | None = None


@dataclass(frozen=True)
class Timeline:
    """Lanes of a window of RL, seconds since it began."""

    start: float
    end: float
    lanes: list[Strip]


@dataclass(frozen=True)
class Slices:
    """pass@1 by one field of the held-out tasks: rows of (value, tasks, {policy: share or None})."""

    title: str
    policies: list[str]
    rows: list[tuple[str, int, dict[str, float | None]]]


@dataclass(frozen=True)
class Example:
    """One task, before and after: rollouts of different policies side by side."""

    prompt: str
    task_id: str
    family: str
    rollouts: list[Trajectory]


@dataclass
class Report:
    """Everything the page shows, computed once for all three forms. ``running``: what is missing may still come."""

    run: RunInfo
    headline: Headline
    comparisons: list[Comparison]
    slices: list[Slices]
    sections: list[StageSection]
    timeline: Timeline | None
    examples: list[Example]
    missing: list[str]
    problems: list[str]
    generated_at: str = ""
    decisions: list[DecisionRecord] = dataclasses.field(default_factory=list)
    rounds: list[Round] = dataclasses.field(default_factory=list)
    running: bool = False


def build_report(inputs: RunInputs, latest: bool = False) -> Report:
    """Computes the report; never fails for a part that is missing. ``latest``: the timeline shows the end of what there
    is, and not its middle."""
    problems = list(inputs.problems)
    try:
        comparisons = compare(inputs.evaluations)
    except ConfigError as error:  # the rates stand, each for itself
        problems.append(f"{error.cause}: no changes are shown")
        comparisons = compare(inputs.evaluations, pairs=())
    missing = _missing(inputs, comparisons)
    sections = []
    details = {stage.name: stage.detail for stage in inputs.run.stages}
    # In the order of the run, then what it does not name.
    for stage in dict.fromkeys([*details, *EXPECTED_STAGES, *sorted(inputs.metrics)]):
        metrics = inputs.metrics.get(stage)
        charts, absent, rest = stage_charts(stage, metrics)
        if metrics and not _stepless(stage, details):
            missing += absent
        more = [c for name in rest if metrics and (c := plain_chart(metrics, name))]
        positions = position_table(details.get(stage, {}))
        if charts or more or positions:
            sections.append(StageSection(stage, STAGE_TITLES.get(stage, stage), charts, more, positions))
    return Report(
        run=inputs.run,
        headline=untrained(inputs.run) or headline(comparisons),
        comparisons=comparisons,
        slices=_slices(inputs.evaluations),
        sections=sections,
        timeline=_timeline(inputs.timeline, latest),
        examples=_examples(inputs.trajectories),
        missing=missing,
        problems=problems,
        generated_at=now_iso(),
        decisions=inputs.decisions,
        rounds=rounds(inputs.feedback, inputs.decisions, inputs.run.stages),
    )


def write_report(run_dir: Path, out_dir: Path | None = None, run: RunInfo | None = None) -> Report:
    """Reads `run_dir`, writes report.html and report.json into `out_dir` (default: `run_dir`), returns the report.

    Raises MissingArtifact when there is no such run, ResourceExhausted on a full disk.
    """
    from cadenza.evaluation.report_html import render_html  # it needs Report, defined here

    report = build_report(read_run(run_dir, run))
    out_dir = out_dir or run_dir
    text = json.dumps(to_json(report), indent=2, allow_nan=False, ensure_ascii=False)
    write_text(out_dir / "report.json", text + "\n")
    write_text(out_dir / "report.html", render_html(report))
    return report


def to_json(report: Report) -> dict[str, Any]:
    """The numbers of the report, without pictures. Rates are shares of 1, changes too."""
    return {
        "format_version": FORMAT_VERSION,
        "generated_at": report.generated_at,
        "headline": dataclasses.asdict(report.headline),
        "views": [
            {
                "view": c.view.key,
                "title": c.view.title,
                "policies": [_plain(row) for row in c.rows],
                "changes": [_plain(change) for change in c.changes],
            }
            for c in report.comparisons
        ],
        "slices": [_plain(s) for s in report.slices],
        "busy_in_window": {s.lane: s.busy for s in report.timeline.lanes} if report.timeline else {},
        "charts": {s.stage: [c.title for c in s.charts] for s in report.sections},
        "decisions": [d.model_dump(mode="json") for d in report.decisions],
        "rounds": [_plain(r) for r in report.rounds],
        "not_run": report.missing,
        "problems": report.problems,
        "run": report.run.model_dump(mode="json"),
    }


def _missing(inputs: RunInputs, comparisons: Sequence[Comparison]) -> list[str]:
    told = []
    details = {stage.name: stage.detail for stage in inputs.run.stages}
    for stage in EXPECTED_STAGES:
        if stage not in inputs.metrics and not _stepless(stage, details):
            told.append(f"{STAGE_TITLES[stage]}: no metrics were recorded")
    seen = {c.view.key: c for c in comparisons}
    for key, sentence in (
        ("heldout", "No evaluation on held-out tasks"),
        ("unseen", "No evaluation on families never trained on"),
        ("hard", "No evaluation on the hard split"),
    ):
        if key not in seen:
            told.append(sentence)
    if "heldout" in seen:
        have = {row.policy for row in seen["heldout"].rows}
        absent = [label(p) for p in ("base", "sft", "rl") if p not in have]
        if absent:
            told.append(f"Not evaluated on held-out tasks: {', '.join(absent)}")
        if "sft_continued" not in have:
            told.append("SFT continued for the same wall time was not run: it belongs to make proof")
    if not inputs.timeline:
        told.append("No timeline of services was recorded")
    if not inputs.trajectories:
        told.append("No example trajectories were kept")
    if len(inputs.run.seeds) == 1:
        told.append(
            "One seed: how much the result varies between runs is not measured here (make proof does)"
        )
    return told


def _stepless(stage: str, details: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a stage made no step: the headline says so once, and every curve of it would say it again."""
    return details.get(stage, {}).get("steps") == 0


def _timeline(spans: Sequence[Span], latest: bool) -> Timeline | None:
    """A window from the middle of RL, whose start and end are not how it usually goes, or the latest one."""
    if not spans:
        return None
    first, last = min(s.start for s in spans), max(s.end for s in spans)
    if last <= first:
        return None
    middle = (first + last) / 2
    start = max(first, last - TIMELINE_WINDOW_S if latest else middle - TIMELINE_WINDOW_S / 2)
    end = min(last, start + TIMELINE_WINDOW_S)
    found = {s.lane for s in spans}
    lanes = [n for n in LANES if n in found] + sorted(found - set(LANES))
    strips = [strip(n, [(s.start, s.end) for s in spans if s.lane == n], start, end) for n in lanes]
    return Timeline(start, end, strips)


def _slices(results: Sequence[EvalResult]) -> list[Slices]:
    """Held-out pass@1 by family, ambiguity and edits, mean over seeds; sampled, or greedy where that is all."""
    heldout = [r for r in results if r.suite == "heldout"]
    sampled = [r for r in heldout if r.temperature > 0] or heldout
    if not sampled:
        return []
    policies = ordered({r.policy for r in sampled})
    tables = []
    for field, title in (
        ("family", "Bug family"),
        ("ambiguity", "Ambiguity of the issue"),
        ("edits", "Edits needed"),
    ):
        cells: dict[str, dict[str, list[float]]] = {}
        tasks: dict[str, set[str]] = {}
        for result in sampled:
            for value, outcomes in result.slices(field).items():
                rates = pass_at_k(outcomes).values_N
                tasks.setdefault(value, set()).update(outcomes.task_ids)
                if np.isfinite(rates).any():
                    cells.setdefault(value, {}).setdefault(result.policy, []).append(float(np.nanmean(rates)))
        rows = [
            (value, len(tasks[value]), {p: _mean(cells.get(value, {}).get(p, [])) for p in policies})
            for value in sorted(tasks)
        ]
        if len(rows) > 1:
            tables.append(Slices(title, policies, rows))
    return tables


def _examples(trajectories: Sequence[Trajectory]) -> list[Example]:
    """Tasks with rollouts of several policies, first those that the last one solved and the one before it did not; the
    last shown is one that took several contexts, if there is any and none is shown before."""
    by_task: dict[str, dict[str, Trajectory]] = {}
    for t in trajectories:
        by_task.setdefault(t.task_id, {}).setdefault(t.policy, t)
    examples = []
    for task_id, found in by_task.items():
        rollouts = [found[p] for p in ordered(set(found))]
        examples.append(Example(rollouts[0].prompt, task_id, rollouts[0].family, rollouts))

    def rank(e: Example) -> tuple[int, int]:
        told_apart = len(e.rollouts) > 1 and bool(e.rollouts[-1].solved) and not e.rollouts[-2].solved
        return (0 if told_apart else 1 if len(e.rollouts) > 1 else 2, sum(len(r.turns) for r in e.rollouts))

    def summarized(e: Example) -> bool:
        return any(turn.kind == "summary" for turn in e.rollouts[-1].turns)

    examples.sort(key=rank)
    shown, left = examples[:MAX_EXAMPLES], examples[MAX_EXAMPLES:]
    if not any(map(summarized, shown)) and (long := next(filter(summarized, left), None)):
        shown[-1] = long
    return shown


def _plain(value: Row | Change | Slices | Round) -> dict[str, Any]:
    return dataclasses.asdict(value)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
