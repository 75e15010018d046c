"""``cadenza doctor``: what this machine can do, and how to mend what it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
[bold]Examples[/bold]

cadenza doctor               exits with 1 when something that training needs is missing

cadenza doctor --json        the same as JSON, for a script
"""

_MARKS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def doctor(
    run_dir: Annotated[
        Path, typer.Option("--run-dir", help="Check the disk that would hold this folder.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: Python, torch, memory, disk, sandbox, Ray. Each failing line names the mend."""
    from cadenza.pipelines.doctor import examine

    checks = examine(run_dir)
    healthy = all(check.state != "fail" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": healthy, "checks": [check.to_plain() for check in checks]}))
    else:
        from rich.console import Console
        from rich.markup import escape

        console = Console(highlight=False, soft_wrap=True)
        for check in checks:
            mend = f"; {check.mend}" if check.mend else ""
            console.print(f"{_MARKS[check.state]}  {check.name:<10} {escape(check.found + mend)}")
    if not healthy:
        raise typer.Exit(1)
