"""The report in a terminal, with rich."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cadenza.evaluation.charts import signed
from cadenza.evaluation.comparison import Comparison, label
from cadenza.evaluation.report import Report
from cadenza.evaluation.report_html import bars, changes, duration
from cadenza.evaluation.statistics import Estimate

_TONES = {"good": "green", "bad": "red", "open": "yellow"}
_BAR = 8  # characters


def print_report(report: Report, console: Console | None = None, page: Path | None = None) -> None:
    """Prints the headline, every view, the stages, what was not run, and where the page lies."""
    console = console or Console()
    tone = _TONES[report.headline.tone]
    title = Text(report.headline.text, style=f"bold {tone}")
    told = [title, Text(report.headline.detail)]
    if report.headline.command:
        told.append(Text(report.headline.command, style="bold"))
    console.print(Panel(Group(*told), border_style=tone, box=box.ROUNDED))
    for view in report.comparisons:
        console.print(_rates(view))
        if changes(view)["rows"]:
            console.print(_changes(view))
    if report.run.stages:
        stages = "  ".join(f"{s.name} {s.status} {duration(s.wall_s)}" for s in report.run.stages)
        console.print(Text.assemble(("Stages  ", "bold"), stages))
    for note in report.run.notes:
        console.print(Text(note, style="dim"))
    if report.missing:
        console.print(Text("Not run or not recorded", style="bold"))
        for sentence in report.missing:
            console.print(Text(f"  · {sentence}", style="dim"))
    for problem in report.problems:
        console.print(Text(f"  ! {problem}", style="red"))
    if page is not None:
        console.print(Text.assemble(("Report  ", "bold"), str(page)))


def _rates(view: Comparison) -> Table:
    table = Table(
        title=view.view.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    best_of, greedy = view.best_k > 1, any(row.greedy and row.sampled for row in view.rows)
    names = ["policy", "", "pass@1 [95%]", *([f"best of {view.best_k}"] if best_of else [])]
    for name in (*names, *(["greedy"] if greedy else []), "tokens"):
        table.add_column(name, justify="left" if name in ("policy", "") else "right", no_wrap=True)
    widths = {b["policy"]: b["width"] for b in bars(view)["rows"]}
    for row in view.rows:
        shown, best = row.sampled or row.greedy, view.best_of(row)
        cells = [label(row.policy), "█" * round(_BAR * widths.get(row.policy, 0.0)), _interval(shown)]
        cells += [_pct(best.value if best else None)] if best_of else []
        cells += [_pct(row.greedy.value if row.greedy else None)] if greedy else []
        table.add_row(*cells, f"{row.tokens.spent:.0f}" if row.tokens.spent is not None else "–")
    return table


def _changes(view: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in changes(view)["rows"]:
        holds = row["holds"]
        ruled = "" if holds is None else "ruled out" if holds.holds else "not ruled out"
        table.add_row(
            f"{label(row['old'])} → {label(row['new'])}",
            row["kind"],
            Text(f"{signed(row['point'])} points", style=_TONES[row["tone"]]),
            f"\\[{signed(row['low'])}, {signed(row['high'])}]",
            "" if holds is None else f"−{100 * holds.margin:.0f} {ruled}",
        )
    return table


def _interval(rate: Estimate | None) -> str:
    return f"{_pct(rate.value)} \\[{100 * rate.low:.1f}, {100 * rate.high:.1f}]" if rate else "–"


def _pct(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
