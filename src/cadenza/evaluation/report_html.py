"""report.html: one file, no script, no network; every text from a run is escaped."""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

from cadenza.evaluation.charts import number, signed, strip_svg
from cadenza.evaluation.comparison import Change, Comparison, Row, label
from cadenza.evaluation.report import Report
from cadenza.evaluation.report_charts import is_by_position
from cadenza.evaluation.report_decisions import card
from cadenza.evaluation.report_round import COLUMNS
from cadenza.evaluation.statistics import Estimate, NonInferiority

_Shown = tuple[str, Estimate | None, NonInferiority | None]


def render_html(report: Report, live: str = "") -> str:
    """The page as text. ``live``: the version of what it shows, for a page that follows a run."""
    loader = jinja2.FunctionLoader(_template)
    env = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    env.filters.update(
        pct=_pct,
        number=number,
        duration=duration,
        policy=label,
        card=card,
        coded=coded,
        fact=_fact,
        signed=signed,
        share=lambda x: f"{100 * x:.2f}%",
    )
    env.globals.update(
        strip_svg=lambda lane: Markup(strip_svg(lane)),
        svg=Markup,
        bars=bars,
        changes=changes,
        flat=flat,
        tint=tint,
        facts=facts,
        columns=COLUMNS,
        clock=lambda s: f"{int(s) // 60}:{int(s) % 60:02d}",
    )
    return env.get_template("report.html").render(report=report, run=report.run, live=live)


def _template(name: str) -> str:
    return (resources.files("cadenza.evaluation") / "templates" / name).read_text(encoding="utf-8")


def bars(comparison: Comparison) -> dict[str, Any]:
    """Bar lengths and whiskers as shares of an axis that starts at 0 and ends at a round rate."""
    rates = [(row, rate) for row in comparison.rows if (rate := _shown(row))]
    top = max((rate.high for _, rate in rates), default=0.0)
    end = min(
        1.0, max(0.05, next(x for x in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0) if x >= min(1.0, top)))
    )
    return {
        "ticks": [(end * i / 4, i / 4) for i in range(5)],
        "rows": [
            {
                "policy": row.policy,
                "rate": rate,
                "width": rate.value / end,
                "low": rate.low / end,
                "span": (min(rate.high, end) - rate.low) / end,
            }
            for row, rate in rates
        ],
    }


def changes(comparison: Comparison) -> dict[str, Any]:
    """Each change as a point with whiskers on an axis symmetric about zero, in points."""
    entries: list[tuple[Change, str, Estimate, NonInferiority | None]] = []
    for change in comparison.changes:
        shown: list[_Shown] = [("pass@1", change.sampled, None)]
        if (change.old, change.new) == ("sft", "rl"):  # what RL may have lost while it gained pass@1
            shown.append(("greedy", change.greedy, change.greedy_holds))
            shown.append((f"best of {change.best_k}", change.best, change.best_holds))
        entries += [(change, kind, value, holds) for kind, value, holds in shown if value]
    reach = max((abs(x) for _, _, v, _ in entries for x in v.points()), default=0.0)
    end = 5.0 * max(1, math.ceil(reach / 5.0))
    rows = []
    for change, kind, value, holds in entries:
        point, low, high = value.points()
        rows.append(
            {
                "old": change.old,
                "new": change.new,
                "kind": kind,
                "point": point,
                "low": low,
                "high": high,
                "at": 0.5 + point / end / 2,
                "from": 0.5 + low / end / 2,
                "span": (high - low) / end / 2,
                "tone": "good" if low > 0 else "bad" if high < 0 else "open",
                "holds": holds,
            }
        )
    return {"rows": rows, "end": end}


def flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested tables as dotted keys."""
    found: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found += flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            for i, item in enumerate(value):
                found += flat(item, f"{prefix}{key}.{item.get('name', i)}.")
        else:
            found.append((f"{prefix}{key}", str(value)))
    return found


def coded(text: str) -> Markup:
    """A sentence whose words between backticks are code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one that opens nothing
        return escape(text)
    made = [Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts)]
    return Markup("").join(made)


def facts(detail: dict[str, Any]) -> list[tuple[str, str]]:
    """A stage's figures as texts, but for those that have a table of their own."""
    return [(name, _fact(value)) for name, value in detail.items() if not is_by_position(name)]


def _fact(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, float) else str(value)


def tint(share: float | None) -> str:
    """Background strength of a table cell, 0 to 0.6."""
    return "0" if share is None else f"{0.6 * share:.2f}"


def duration(seconds: float | None) -> str:
    """8 s, 3 min 20 s, 2 h 5 min."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if seconds >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _pct(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def _shown(row: Row) -> Estimate | None:
    return row.sampled or row.greedy
