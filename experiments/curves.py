"""What is kept of the metrics of an arm's stages, and the few numbers that a record has of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from cadenza.core.files import write_bytes
from cadenza.evaluation.report_inputs import Metrics, read_metrics

MAX_CURVE_BYTES = 200_000  # of one metric file kept in the repository; longer ones are thinned


def keep_curves(folders: Sequence[Path], target: Path) -> list[str]:
    """Copies the metrics of stages' folders, thinned where they are long, and tables of tried temperatures. Returns the
    names."""
    target.mkdir(parents=True, exist_ok=True)
    kept = []
    for folder in folders:
        for path in sorted((folder / "metrics").glob("*.jsonl")):
            problems: list[str] = []
            write_bytes(target / path.name, read_metrics(path, problems).thinned(MAX_CURVE_BYTES).encode())
            kept.append(path.name)
            for problem in problems:
                print(f"curves: {problem}", file=sys.stderr)
        for path in sorted(folder.glob("temperature-*.json")):
            write_bytes(target / path.name, path.read_bytes())
            kept.append(path.name)
    return kept


def speed(stage: str, folder: Path) -> dict[str, float]:
    """Of an RL stage, from its metrics: busy shares, rollouts a second, the share of the weights that a delta takes,
    that of rollouts which met two versions, and how many of its steps the engine lost to a swap. Empty for others."""
    path = folder / "metrics" / f"{stage}.jsonl"
    if not stage.startswith("rl") or not path.exists():
        return {}
    metrics = read_metrics(path)
    # Busy shares are since the start: the last row speaks of the whole run.
    found = {name: metrics.last(name) for name in ("trainer_busy", "engine_busy", "env_busy")}
    found["rollouts_per_s"] = pace(metrics)[0] or None
    (_, deltas), (_, full) = metrics.series("delta_bytes"), metrics.series("weights_bytes")
    if full:
        found["delta_vs_full"] = sum(deltas) / sum(full)
    for name in ("spans_versions", "swap_pause_steps"):
        _, values = metrics.series(name)
        if values:
            found[name] = sum(values) / len(values)
    return {name: value for name, value in found.items() if value is not None}


def pace(metrics: Metrics, span_s: float = math.inf) -> tuple[float, float]:
    """Rollouts of finished groups a second within ``span_s`` of the end of the first step (the start, with compilation
    and the first batch, is no part of the pace), and the seconds that were looked at; 0 with fewer than two steps."""
    times, trained = metrics.series("rollouts_trained", x="t")
    within = [(t, n) for t, n in zip(times, trained, strict=True) if t - times[0] <= span_s]
    if len(within) < 2:
        return 0.0, 0.0
    (first, before), (last, after) = within[0], within[-1]
    return (after - before) / (last - first), last - first
