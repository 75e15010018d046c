"""Which metric becomes which chart, and what to look for in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cadenza.evaluation.charts import Line, line_chart, number
from cadenza.evaluation.report_inputs import Metrics

STAGE_TITLES = {
    "cpt": "Continued pretraining",
    "mtp": "Multi-token prediction heads",
    "long": "Continued pretraining at four times the length",
    "sft": "Supervised fine-tuning",
    "rl": "Reinforcement learning",
    "sft_continued": "Supervised fine-tuning, continued for the time of RL",
    "rl_sync": "Reinforcement learning, synchronous",
}


@dataclass(frozen=True)
class ChartSpec:
    """One chart of a stage. ``series``: (metric name, shown name). ``needed``: its absence is worth a sentence."""

    title: str
    series: tuple[tuple[str, str], ...]
    caption: str
    percent: bool = False
    zero: bool = False
    smooth: bool = False
    needed: bool = True


@dataclass(frozen=True)
class Legend:
    """One entry above a chart: style class, name and the value at the end."""

    style: str
    name: str
    value: str


@dataclass(frozen=True)
class Chart:
    """A chart ready for the page."""

    title: str
    caption: str
    svg: str
    legend: tuple[Legend, ...]


@dataclass(frozen=True)
class PositionTable:
    """Perplexity by position in a row. ``columns``: positions; ``rows``: (when, one value a column)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]


_RL_CHARTS = (
    ChartSpec(
        "Share of training rollouts solved", (("pass_rate", "training tasks"), ("val_pass1", "validation")),
        "Noisy by nature: each step sees other tasks. The bars above, on fixed tasks, are the measurement.",
        percent=True, smooth=True,
    ),
    ChartSpec(
        "Entropy", (("entropy", "nats a sampled token"),),
        "Falling to zero means the policy stopped exploring.", zero=True, smooth=True,
    ),
    ChartSpec(
        "Trainer against engine", (("logprob_gap", "mean |log-prob gap|"), ("k3", "mean k3")),
        "The same tokens scored by both at the same weights; it should stay near zero.", zero=True,
    ),
    ChartSpec(
        "Staleness", (("staleness_mean", "mean"), ("staleness_max", "oldest token")),
        "Policy versions between sampling a token and training on it.", zero=True,
    ),
    ChartSpec(
        "Tokens a rollout", (("tokens_per_rollout", "sampled"), ("context_per_rollout", "with prompt and tools")),
        "Sampled tokens until the agent finishes or runs out.", smooth=True,
    ),
    ChartSpec(
        "Busy shares", (("trainer_busy", "trainer"), ("engine_busy", "engine"), ("env_busy", "environments")),
        "Share of wall time each service worked. Overlap makes the sum exceed 100%.",
        percent=True, zero=True, smooth=True,
    ),
    ChartSpec(
        "Watched behaviours",
        (
            ("broken_calls_per_rollout", "broken calls"), ("needless_reruns_per_rollout", "needless reruns"),
            ("open_todos_per_rollout", "items left open"), ("broken_summaries_per_rollout", "broken summaries"),
        ),
        "A rollout's mean, whether a reward prices them or not. One that climbs is a policy that games its reward.",
        zero=True, smooth=True, needed=False,
    ),
    ChartSpec(
        "Guesses that the engine kept", (("accepted_1", "first"), ("accepted_2", "second"), ("accepted_3", "third")),
        "Speculative decoding: what the heads guessed and sampling then drew. A later one needs those before it.",
        percent=True, zero=True, needed=False,
    ),
    ChartSpec(
        "Weights sent to the engine", (("delta_bytes", "bytes a step"), ("weights_bytes", "all weights")),
        "Only what changed is sent, bit by bit.", zero=True, needed=False,
    ),
)  # fmt: skip

_PERPLEXITY = ChartSpec(
    "Perplexity", (("heldout_perplexity", "held-out source files"), ("train_perplexity", "training")),
    "On source files kept out of training; lower is better.",
)  # fmt: skip

CHARTS: dict[str, tuple[ChartSpec, ...]] = {
    "cpt": (_PERPLEXITY,),
    "long": (_PERPLEXITY,),
    "mtp": (
        ChartSpec(
            "Guesses that hold", tuple((f"agreement_{k}", f"{k} ahead") for k in (1, 2, 3, 4)),
            "How often a head's likeliest token is the trunk's own, on source files kept out of training.",
            percent=True, zero=True,
        ),
    ),
    "sft": (
        ChartSpec(
            "Loss", (("heldout_loss", "held-out"), ("train_loss", "training")),
            "Nats a trained token, on demonstrations of the scripted expert.", smooth=True,
        ),
        ChartSpec(
            "Validation tasks solved", (("val_pass1", "pass@1"), ("val_greedy", "greedy")),
            "Run in real sandboxes. A flat end means the demonstrations have given what they can.",
            percent=True, needed=False,
        ),
    ),
    "rl": _RL_CHARTS,
}  # fmt: skip


def position_table(detail: Mapping[str, Any]) -> PositionTable | None:
    """From the figures ``perplexity_WHEN_quarterN`` of a pretraining stage; None where they are not all there."""
    rows = []
    for when, shown in (("unstretched", "as it came"), ("before", "before"), ("after", "after")):
        values = tuple(
            v for n in (1, 2, 3, 4) if (v := detail.get(f"perplexity_{when}_quarter{n}")) is not None
        )
        if len(values) == 4:
            rows.append((shown, values))
    if not rows:
        return None
    length = detail.get("row_length")
    columns = [f"quarter {n}" for n in (1, 2, 3, 4)]
    if isinstance(length, int):
        columns = [f"to {n * length // 4}" for n in (1, 2, 3, 4)]
    return PositionTable(tuple(columns), tuple(rows))


def is_by_position(name: str) -> bool:
    """Whether a figure of a stage is told by its ``PositionTable``."""
    return name.startswith("perplexity_") and "_quarter" in name


def stage_charts(stage: str, metrics: Metrics | None) -> tuple[list[Chart], list[str], list[str]]:
    """(charts, sentences on charts that lack data, metrics that no chart shows) of one stage."""
    drawn, missing, used = [], [], set()
    for spec in CHARTS.get(stage, _RL_CHARTS if stage.startswith("rl") else CHARTS["sft"]):
        chart = _draw(spec, metrics) if metrics else None
        used |= {name for name, _ in spec.series}
        if chart:
            drawn.append(chart)
        elif spec.needed:
            names = " or ".join(name for name, _ in spec.series)
            missing.append(
                f"{STAGE_TITLES.get(stage, stage)}: no {spec.title.lower()} curve ({names} not recorded)"
            )
    rest = [name for name in metrics.names() if name not in used] if metrics else []
    return drawn, missing, rest


def plain_chart(metrics: Metrics, name: str) -> Chart | None:
    """A chart of a metric nobody described: its name is its title."""
    return _draw(ChartSpec(name, ((name, name),), "", smooth=True), metrics)


def _draw(spec: ChartSpec, metrics: Metrics) -> Chart | None:
    lines, legend = [], []
    for i, (name, shown) in enumerate(spec.series):
        xs, ys = metrics.series(name)
        if xs:
            lines.append(Line(shown, xs, ys, f"s{i}", spec.smooth))
            legend.append(Legend(f"s{i}", shown, f"{100 * ys[-1]:.0f}%" if spec.percent else number(ys[-1])))
    if not lines:
        return None
    svg = line_chart(lines, title=spec.title, x_label="step", percent=spec.percent, zero=spec.zero)
    return Chart(spec.title, spec.caption, svg, tuple(legend))
