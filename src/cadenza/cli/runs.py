"""``cadenza runs``: what was run, and how far it came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
[bold]Examples[/bold]

cadenza runs                 all runs under ./runs

cadenza runs demo            the stages of the run named demo, with their figures, and which policy is served

cadenza runs --json          one JSON object a run
"""


def runs(
    name: Annotated[str | None, typer.Argument(help="Show the stages of the runs with this name.")] = None,
    folder: Annotated[Path, typer.Option("--folder", help="The folder of runs.", file_okay=False)] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a run.")] = False,
) -> None:
    """List runs, their stages, and the policies that their aliases (serving, candidate, canary) point at."""
    from cadenza.pipelines.overview import aliases_table, list_runs, runs_table, stages_table

    found = list_runs(folder, name)
    if as_json:
        for run in found:
            typer.echo(json.dumps(run))
        return
    from rich.console import Console

    console = Console()
    if name is None:
        console.print(runs_table(found))
        return
    for run in found:
        console.print(stages_table(run))
        if run["aliases"]:
            console.print(aliases_table(run))
