"""What a run leaves behind for the report, and nothing else: the schema that stages write to.

    run_info.json           RunInfo: what was run, where, for how long
    metrics/<stage>.jsonl   one object a line: {"t": seconds since run start, "step": n, name: number, ...}
    timeline.jsonl          Span: what a service was doing, when
    evaluations/*.json      EvalResult
    trajectories.jsonl      Trajectory: readable rollouts
    decisions.jsonl         DecisionRecord: what the gate and the canary decided
    feedback.jsonl          what users did with answers: events in the format feedback/1

Each may lie in the run's folder or in the folder of any of its stages (a stage writes only into its own); several
of one kind are joined. Every part may be missing: the report then says so. A damaged part is named, never
guessed at. docs/explanation/evaluation.md lists the metric names that have a chart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from cadenza.core.config import StrictConfig
from cadenza.core.errors import CadenzaError, MissingArtifact
from cadenza.core.types import Rollout, Task
from cadenza.evaluation.result import EvalResult, write_text

MAX_TURN_CHARS = 1200  # of one turn shown in the report
DAMAGED = "damaged"  # the policy of a real-time round's drills
# How a trajectory of a real-time round begins: ROUND/..., where the answers are learned from, or SEED/DRILL/VERSION/...
ROUND, DRILL = "round", "drill"


class StageInfo(StrictConfig):
    """``status``: done | running | failed | skipped | waiting. ``detail``: short facts, {"tokens": "1.2 M"}."""

    name: str
    status: str
    wall_s: float | None = None
    detail: dict[str, bool | str | int | float] = {}


class RunInfo(StrictConfig):
    """``command``: goes on with the run when given again; "" when none began it. ``notes``: sentences the reader must
    see, e.g. that the base model ships with the package."""

    format_version: int = 1
    name: str
    recipe: str = ""
    seeds: tuple[int, ...] = ()
    started_at: str = ""  # ISO 8601, UTC
    wall_s: float | None = None
    command: str = ""
    commit: str = ""
    config: dict[str, Any] = {}
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
    stages: tuple[StageInfo, ...] = ()
    notes: tuple[str, ...] = ()


class Span(StrictConfig):
    """A service at work from `start` to `end`, seconds since RL began; equal ends mark an instant.

    ``lane``: trainer | engine | environment | weights, or any other service.
    """

    lane: str
    start: float
    end: float
    label: str = ""


class Turn(StrictConfig):
    """``kind``: think | call | output | final | summary (carried into the next context; empty where it was cut or
    broken) | broken (a call that could not be read)."""

    kind: str
    text: str


class Trajectory(StrictConfig):
    """One rollout made readable. ``prompt``: what the user asked. ``patch``: unified diff. ``contexts``: that it
    took; the next begins after each turn of the kind summary, or somewhere unknown where there is none."""

    task_id: str
    policy: str
    sample: int = 0
    solved: bool | None
    prompt: str
    turns: tuple[Turn, ...]
    family: str = ""
    ambiguity: int = 0
    tokens: int = 0
    contexts: int = 1
    patch: str = ""


class DecisionRecord(StrictConfig):
    """What a guard decided about a policy. ``guard``: gate | canary. ``against``: what it was compared with.
    ``reasons``: (whether it speaks for the policy, a sentence). ``stage``: of the run; the reader fills it in."""

    stage: str = ""
    guard: str
    policy: str
    against: str = ""
    outcome: str  # promoted | refused | passed | rolled_back | watching (too few answers to decide)
    reasons: tuple[tuple[bool, str], ...] = ()

    @classmethod
    def from_event(cls, kind: str, data: dict[str, Any]) -> DecisionRecord:
        """From an event of the run database."""
        if kind == "gate":
            return cls(
                guard="gate", policy=data["candidate"], against=data["baseline"],
                outcome="promoted" if data["promote"] else "refused",
                reasons=tuple((check["passed"], check["detail"]) for check in data["checks"]),
            )  # fmt: skip
        return cls(
            guard="canary", policy=data["policy"], against="serving", outcome=data["state"],
            reasons=((data["state"] == "passed", data["reason"]),),
        )  # fmt: skip


@dataclass
class Metrics:
    """Columns of one metric file, in step order; a step written twice (a resumed run) keeps its last line."""

    rows: list[dict[str, float]]

    def series(self, name: str, x: str = "step") -> tuple[list[float], list[float]]:
        """The (x, value) pairs where both are finite."""
        points = [(r[x], r[name]) for r in self.rows if name in r and x in r]
        return [p[0] for p in points], [p[1] for p in points]

    def names(self) -> list[str]:
        """Every metric seen, in order of first appearance, without t and step."""
        return list(dict.fromkeys(n for r in self.rows for n in r if n not in ("t", "step")))

    def last(self, name: str) -> float | None:
        """The latest value."""
        return next((r[name] for r in reversed(self.rows) if name in r), None)

    def thinned(self, max_bytes: int) -> str:
        """The rows as JSON lines of at most about `max_bytes`, values to six digits. Of rows with the same names every
        so many stay, so that what is measured rarely (validation) is not lost among what is measured at each step;
        the last row stays."""
        lines = [json.dumps({k: _short(v) for k, v in row.items()}) + "\n" for row in self.rows]
        stride = max(1, math.ceil(sum(map(len, lines)) / max_bytes))
        seen: dict[tuple[str, ...], int] = {}
        kept = []
        for number, (row, text) in enumerate(zip(self.rows, lines, strict=True), 1):
            before = seen.get(tuple(row), 0)
            seen[tuple(row)] = before + 1
            if before % stride == 0 or number == len(lines):
                kept.append(text)
        return "".join(kept)


@dataclass
class RunInputs:
    """Everything found; `problems` are sentences about what could not be read."""

    run: RunInfo
    metrics: dict[str, Metrics] = field(default_factory=dict)
    timeline: list[Span] = field(default_factory=list)
    evaluations: list[EvalResult] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    feedback: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by stage
    problems: list[str] = field(default_factory=list)


class MetricWriter:
    """Appends lines to metrics/<stage>.jsonl; owned by the stage that opens it, closed by its `with` block."""

    def __init__(self, run_dir: Path, stage: str) -> None:
        path = run_dir / "metrics" / f"{stage}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        if not _ends_whole(path):
            self._file.write("\n")

    def write(self, t: float, step: int, **values: float) -> None:
        """One line, on disk when this returns. Values that are not finite are left out: a gap, not a zero."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        body = {"t": round(t, 3), "step": step, **finite}
        self._file.write(json.dumps(body) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _ends_whole(path: Path) -> bool:
    """False when a killed writer left its last line half done."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return size == 0 or file.read() == b"\n"


def write_run_info(folder: Path, run: RunInfo) -> None:
    """Replaces run_info.json atomically."""
    write_text(folder / "run_info.json", run.model_dump_json(indent=2) + "\n")


def append_lines(path: Path, items: list[Span] | list[Trajectory] | list[DecisionRecord]) -> None:
    """Appends spans or trajectories as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        if not _ends_whole(path):
            file.write("\n")
        file.writelines(item.model_dump_json() + "\n" for item in items)


def trajectory_of(task: Task, prompt: str, policy: str, sample: int, rollout: Rollout) -> Trajectory:
    """Reads a rollout's trace into turns; long texts are cut and say so."""
    turns = []
    for entry in rollout.trace:
        for kind, key in (
            ("think", "think"),
            ("call", "call"),
            ("broken", "text"),
            ("final", "final"),
            ("summary", "carried"),
            ("output", "output"),
        ):
            if entry.get(key) or (kind == "summary" and key in entry):
                turns.append(Turn(kind=kind, text=_cut(_text(entry[key]))))
    score = rollout.verdict.score
    return Trajectory(
        task_id=task.id,
        policy=policy,
        sample=sample,
        solved=None if score is None else score >= 1.0,
        prompt=prompt,
        turns=tuple(turns),
        family="+".join(task.metadata.get("families") or [str(task.metadata.get("family", ""))]),
        ambiguity=task.ambiguity,
        tokens=rollout.sampled_tokens,
        contexts=len(rollout.segments),
        patch=_cut(rollout.patch),
    )


def read_run(run_dir: Path, run: RunInfo | None = None) -> RunInputs:
    """Reads what there is; `run` stands in for run_info.json. Raises MissingArtifact only when `run_dir` itself
    is missing."""
    if not run_dir.is_dir():
        raise MissingArtifact(f"no run at {run_dir}", "give the directory of a run")
    problems: list[str] = []
    folders = _folders(run_dir)
    found = RunInputs(run or _run_info(folders, problems), problems=problems)
    for folder in folders:
        for path in sorted((folder / "metrics").glob("*.jsonl")):
            found.metrics[path.stem] = read_metrics(path, problems)
        found.timeline += _models(folder / "timeline.jsonl", Span, problems)
        found.trajectories += _models(folder / "trajectories.jsonl", Trajectory, problems)
        decisions = _models(folder / "decisions.jsonl", DecisionRecord, problems)
        stage = "" if folder == run_dir else folder.name.removesuffix(".partial")
        found.decisions += [d.model_copy(update={"stage": d.stage or stage}) for d in decisions]
        if events := _events(folder / "feedback.jsonl", problems):
            found.feedback[stage] = events
        for path in sorted((folder / "evaluations").glob("*.json")):
            try:
                found.evaluations.append(EvalResult.load(path))
            except CadenzaError as error:
                problems.append(error.cause)
    return found


def _folders(run_dir: Path) -> list[Path]:
    """The run's folder, then its stages'; of a stage that is finished, its unfinished twin is passed over."""
    inside = sorted(p for p in run_dir.iterdir() if p.is_dir())
    names = {p.name for p in inside}
    return [run_dir, *(p for p in inside if p.suffix != ".partial" or p.stem not in names)]


def _run_info(folders: list[Path], problems: list[str]) -> RunInfo:
    name = folders[0].resolve().name
    path = next((p for f in folders if (p := f / "run_info.json").exists()), None)
    if path is None:
        problems.append("run_info.json is missing: seeds, configuration and machine of this run are unknown")
        return RunInfo(name=name)
    try:
        return RunInfo.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        problems.append(f"run_info.json cannot be read: {str(error).splitlines()[0]}")
        return RunInfo(name=name)


def read_metrics(path: Path, problems: list[str] | None = None) -> Metrics:
    """One metric file; lines that cannot be read are left out and told to `problems`."""
    problems = [] if problems is None else problems
    rows = [r for body in _lines(path, problems) if (r := _numbers(body)) is not None]
    by_step = {r["step"]: r for r in rows if "step" in r}
    return Metrics([by_step[step] for step in sorted(by_step)])


def _lines(path: Path, problems: list[str]) -> Iterator[Any]:
    """JSON values of a file's lines; broken ones become one problem. A missing file has no lines."""
    if not path.exists():
        return
    broken = 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not text.strip():
            continue
        try:
            yield json.loads(text)
        except ValueError:
            broken += 1
    if broken:
        problems.append(f"{path.name}: {broken} line{'s' * (broken > 1)} could not be read and were left out")


def _numbers(body: Any) -> dict[str, float] | None:
    if not isinstance(body, dict):
        return None
    numeric = {k: float(v) for k, v in body.items() if isinstance(v, (int, float))}
    return {k: v for k, v in numeric.items() if math.isfinite(v)}


def _models(path: Path, model: Any, problems: list[str]) -> list[Any]:
    found, refused = [], 0
    for body in _lines(path, problems):
        try:
            found.append(model.model_validate(body))
        except ValidationError:
            refused += 1
    if refused:
        problems.append(f"{path.name}: {refused} entries do not fit the schema and were left out")
    return found


def _events(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Events of users that say who answered and which answer they are about; others are told to `problems`."""
    found, refused = [], 0
    for body in _lines(path, problems):
        if _is_event(body):
            found.append(body)
        else:
            refused += 1
    if refused:
        problems.append(f"{path.name}: {refused} entries do not fit the schema and were left out")
    return found


def _is_event(body: Any) -> bool:
    policy = body.get("policy") if isinstance(body, dict) else None
    if not isinstance(policy, dict):
        return False
    texts = (policy.get("model"), policy.get("arm"), body.get("trajectory_id"), body.get("kind"))
    if not all(isinstance(text, str) for text in texts):
        return False
    return f"/{policy['arm']}-{policy.get('version')}/" in body["trajectory_id"]


def _short(value: float) -> float | int:
    return int(value) if value.is_integer() else float(f"{value:.6g}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    kept = text[:MAX_TURN_CHARS]
    return kept if kept == text else f"{kept}\n[{len(text) - MAX_TURN_CHARS} more characters]"


def now_iso() -> str:
    """UTC time to the second, as RunInfo wants it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
