"""``cadenza runs``: what was run, and how far it came."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
[bold]Examples[/bold]

cadenza runs                 all runs under ./runs

cadenza runs demo            the stages of the run named demo, with their figures, and which policy is served

cadenza runs --json          one JSON object a run
"""


WIDE = 10_000  # columns where there is no terminal: a row is a line there, whatever its length


def _complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    from cadenza.core.errors import CadenzaError
    from cadenza.pipelines.overview import list_runs

    try:
        found = list_runs(Path(ctx.params.get("folder") or "runs"))
    except CadenzaError:  # nothing was run there
        return []
    return sorted({run["name"] for run in found if run["name"].startswith(incomplete)})


def runs(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the stages of the runs with this name.", autocompletion=_complete_name),
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="The folder of runs.", file_okay=False)] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a run.")] = False,
) -> None:
    """List runs, their stages, and the policies that their aliases (serving, candidate, canary) point at."""
    from cadenza.pipelines.overview import aliases_table, heading, list_runs, runs_table, stages_table

    found = list_runs(folder, name)
    if as_json:
        for run in found:
            typer.echo(json.dumps(run))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDE)
    if name is None:
        console.print(runs_table(found))
        return
    for run in found:
        console.print(heading(run), style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(stages_table(run))
        if run["aliases"]:
            console.print(aliases_table(run))
