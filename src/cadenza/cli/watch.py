"""``cadenza watch``: follows a run in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
[bold]Examples[/bold]

cadenza watch                     the newest run under ./runs

cadenza watch runs/demo --port 8000

ssh -L 8000:localhost:8000 HOST   then look at a run on another machine: http://localhost:8000/
"""


def watch(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="The folder of a run.", file_okay=False)
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Who may look: this machine by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8765,
) -> None:
    """Follow a run in the browser: curves, services, trajectories, gate decisions."""
    from cadenza.observe import serve
    from cadenza.pipelines.overview import newest_run
    from cadenza.pipelines.run_folder import database_of

    folder = run or newest_run(Path("runs"))
    try:
        serve(
            folder,
            database_of(folder.absolute().parent),
            host,
            port,
            on_ready=lambda address, _: typer.echo(f"{folder}: {address}  (Ctrl-C ends it, and not the run)"),
        )
    except KeyboardInterrupt:
        typer.echo("")
