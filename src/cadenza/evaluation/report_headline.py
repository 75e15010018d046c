"""The first thing a report says: the result in a sentence, or why there is none."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.evaluation.charts import signed
from cadenza.evaluation.comparison import Comparison, label
from cadenza.evaluation.report_inputs import RunInfo
from cadenza.evaluation.statistics import Estimate


@dataclass(frozen=True)
class Headline:
    """The result in a sentence. ``tone``: good | bad | open, after the interval and not after the hope. ``command``:
    what a person may give to mend it, complete; "" where there is nothing, or where no command began the run."""

    text: str
    detail: str
    tone: str
    command: str = ""


def untrained(run: RunInfo) -> Headline | None:
    """Where RL changed no weight its policy is the SFT one, and comparing them says nothing of RL."""
    detail = next((stage.detail for stage in run.stages if stage.name == "rl"), {})
    if detail.get("steps") == 0:
        sets = _doubled(run, "rl", "max_seconds")
        return Headline(
            "RL made no step: its time was over before the first.",
            f"What is called RL below has the weights of SFT. {_more('RL more time', sets)}, or use a faster machine.",
            "open",
            _again(run.command, "rl", sets),
        )
    if detail.get("samples_trained") == 0:
        sets = _doubled(run, "sft", "epochs") | _doubled(run, "sft", "budget_s")
        return Headline(
            "RL changed nothing: no task was solved by some of its runs and missed by others.",
            f"What is called RL below has the weights of SFT. {_more('SFT more training', sets)} if it solves nothing.",
            "open",
            _again(run.command, "sft", sets),
        )
    return None


def _doubled(run: RunInfo, stage: str, key: str) -> dict[str, float]:
    """A limit of a stage, doubled, by its full key; nothing where the run has none."""
    tables = run.config.get("stage", [])
    settings: Mapping[str, Any] = next((t for t in tables if t.get("name") == stage), {})
    value = settings.get(key)
    if not isinstance(value, (int, float)) or not 0 < value < 1e6:  # 1e9 s is how a recipe says "no limit"
        return {}
    return {f"{stage}.{key}": 2.0 * value}


def _more(what: str, sets: Mapping[str, float]) -> str:
    return f"Give {what}" + (f" ({', '.join(sets)})" if sets else "")


def _again(command: str, stage: str, sets: Mapping[str, float]) -> str:
    """``command`` with other values of the keys of ``sets``, from ``stage`` on."""
    if not command or not sets:
        return ""
    words, kept = shlex.split(command), []
    while words:
        word = words.pop(0)
        if word == "--set" and words and words[0].partition("=")[0].strip() in sets:
            words.pop(0)
        else:
            kept.append(word)
    for key, value in sets.items():
        kept += ["--set", f"{key}={value:g}"]
    return shlex.join([*kept, "--restart-from", stage])


def headline(comparisons: Sequence[Comparison]) -> Headline:
    """Says what the held-out comparison of RL with SFT shows, or what there is instead of it."""
    heldout = next((c for c in comparisons if c.view.key == "heldout"), None)
    if heldout is None:
        return Headline("Nothing was evaluated on held-out tasks.", "See what was not run, below.", "open")
    rows = {row.policy: row for row in heldout.rows}
    change = next((c for c in heldout.changes if (c.old, c.new) == ("sft", "rl")), None)
    if change is None or change.sampled is None:
        told = [f"{label(p)} {_percent(rate)}" for p, r in rows.items() if (rate := r.sampled or r.greedy)]
        return Headline(
            "Held-out tasks solved: " + ", ".join(told) + ".",
            "RL and SFT were not both evaluated, so no gain can be stated.", "open",
        )  # fmt: skip
    value, low, high = change.sampled.points()
    detail = (
        f"Paired over {change.sampled.n_tasks} held-out tasks, {_seeds(change.seeds)}: "
        f"{signed(value)} points of pass@1, 95% interval {signed(low)} to {signed(high)}."
    )
    old, new = _percent(rows["sft"].sampled), _percent(rows["rl"].sampled)
    if low > 0:
        return Headline(f"RL lifted the agent from {old} to {new} of held-out tasks.", detail, "good")
    if high < 0:
        return Headline(f"RL made the agent worse: {old} to {new} of held-out tasks.", detail, "bad")
    return Headline(
        f"RL shows no certain gain: {old} before, {new} after.",
        detail + " The interval includes zero.",
        "open",
    )


def _percent(rate: Estimate | None) -> str:
    return f"{100 * rate.value:.1f}%" if rate else "not measured"


def _seeds(seeds: Sequence[int]) -> str:
    return "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
