"""Figure lines: one JSON object a line, committed under docs/results, followed over time by name."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import model_validator

from cadenza.core.config import StrictConfig
from cadenza.core.errors import CorruptArtifact, MissingArtifact
from cadenza.core.machine import commit, describe
from cadenza.evaluation.result import write_text
from cadenza.evaluation.statistics import Estimate


class Figure(StrictConfig):
    """One measured number. ``better``: higher | lower. ``interval``: 95% unless ``note`` says otherwise."""

    figure: str
    value: float
    unit: str
    better: str
    peer: str | None = None
    peer_value: float | None = None
    n: int | None = None
    interval: tuple[float, float] | None = None
    seeds: tuple[int, ...] = ()
    note: str | None = None
    commit: str = ""
    machine: dict[str, Any] = {}
    command: str = ""

    @model_validator(mode="after")
    def _finite(self) -> Figure:
        if not all(math.isfinite(x) for x in (self.value, self.peer_value or 0.0, *(self.interval or ()))):
            raise ValueError(f"figure {self.figure} is not finite")
        if self.better not in ("higher", "lower"):
            raise ValueError("better is 'higher' or 'lower'")
        return self


def machine() -> dict[str, Any]:
    """CPU model, usable cores, Python and torch version (None: missing), the part of a machine a figure names."""
    found = describe()
    return {key: found[key] for key in ("cpu", "cores", "python", "torch")}


def command_line() -> str:
    """The command that is running, as a user would type it."""
    script = bool(sys.argv) and sys.argv[0].endswith(".py")
    return shlex.join(["python", *sys.argv] if script else sys.argv)


def points(
    name: str, change: Estimate, *, seeds: Sequence[int], better: str = "higher", note: str | None = None
) -> Figure:
    """A change of a rate as percentage points with its interval."""
    value, low, high = change.points()
    return Figure(
        figure=name, value=round(value, 3), unit="points", better=better, n=change.n_tasks,
        interval=(round(low, 3), round(high, 3)), seeds=tuple(seeds), note=note,
    )  # fmt: skip


def mean_over_seeds(
    name: str, by_seed: Mapping[int, float], unit: str, *, better: str = "higher", note: str = "", n: int = 0
) -> Figure:
    """The mean of one number a seed, with each in the note. ``n``: of what was measured, the seeds where it is 0."""
    told = f"by seed: {', '.join(f'{value:.3g}' for value in by_seed.values())}"
    return Figure(
        figure=name, value=float(f"{sum(by_seed.values()) / len(by_seed):.6g}"), unit=unit, better=better,
        n=n or len(by_seed), seeds=tuple(by_seed), note=f"{told}; {note}" if note else told,
    )  # fmt: skip


def signed(figures: Iterable[Figure]) -> list[Figure]:
    """The same figures with commit, machine and command filled in where they are empty."""
    about = {"commit": commit() or "", "machine": machine(), "command": command_line()}
    return [f.model_copy(update={k: v for k, v in about.items() if not getattr(f, k)}) for f in figures]


def write_figures(path: Path, figures: Iterable[Figure]) -> None:
    """Replaces `path` by these lines, signed: the newest run replaces older ones."""
    write_text(path, "".join(line(f) + "\n" for f in signed(figures)))


def line(figure: Figure) -> str:
    """One JSON line; fields without a value are left out."""
    body = {k: v for k, v in figure.model_dump(mode="json").items() if v not in (None, "", [], {})}
    return json.dumps(body, ensure_ascii=False, allow_nan=False)


def read_figures(path: Path) -> list[Figure]:
    """Raises MissingArtifact, or CorruptArtifact naming the line that is no figure."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise MissingArtifact(f"no figures at {path}", "run the experiment that writes them") from None
    figures = []
    for number, text in enumerate(lines, 1):
        try:
            figures.append(Figure.model_validate_json(text))
        except ValueError:
            raise CorruptArtifact(f"{path}:{number} is no figure", "run the experiment again") from None
    return figures
