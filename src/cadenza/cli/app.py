"""The ``cadenza`` command: it parses, calls one function of a room, and prints. No logic lives here."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

import cadenza
from cadenza.cli import agent, doctor, eval, runs, train, watch
from cadenza.cli.failures import report
from cadenza.core.errors import Interrupted

app = typer.Typer(
    name="cadenza",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, measure and use a coding agent of your own.",
    epilog="Begin with [bold]cadenza doctor[/bold], then [bold]cadenza train demo-quick[/bold]. "
    "Every command explains itself: [bold]cadenza train --help[/bold].",
)
app.command("train", epilog=train.EPILOG)(train.train)
app.command("eval", epilog=eval.EPILOG)(eval.evaluate)
app.command("agent", epilog=agent.EPILOG)(agent.agent)
app.command("runs", epilog=runs.EPILOG)(runs.runs)
app.command("watch", epilog=watch.EPILOG)(watch.watch)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"cadenza {cadenza.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Only carries ``--version``."""


def main() -> None:
    """Runs the command line. Leaves with 0, a CadenzaError's exit code, 2 for wrong usage, or 70 for a defect."""
    try:
        app()
    except Exception as error:
        code = report(error)
        if isinstance(
            error, Interrupted
        ):  # what still closes down says nothing more when Ctrl-C is pressed again
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(code)
