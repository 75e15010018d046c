"""``cadenza agent``: lets a trained model work on a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cadenza.cli.eval import MODEL_MEND, Temperature

EPILOG = """
[bold]Examples[/bold]

cadenza agent ./project --model runs/demo/realtime --task "test_total fails: fix it"

cadenza agent ./project --model runs/demo/realtime --task "..." --apply       also change the files

A demo model knows small Python files with one planted bug, and edits by writing a function or class anew.
The agent works on a copy in a sandbox without network. What it did is printed as a patch; --apply puts it into DIR.
"""

REASONS = {
    "finish": "it said that it is done",
    "max_turns": "it used up its turns",
    "max_tokens": "a turn was cut at its limit",
    "context": "its context was full",
    "budget": "it used up its tokens",
    "errors": "several calls in a row failed",
    "deadline": "its time was over",
}


def agent(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to work on.")],
    task: Annotated[str, typer.Option("--task", "-t", help="What to do, as you would tell a colleague.")],
    model: Annotated[Path, typer.Option("--model", "-m", help="The model's folder.")] = Path(
        "runs/demo/realtime"
    ),
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    apply: Annotated[bool, typer.Option("--apply", help="Write the patch into DIR.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Let a trained model work on a folder."""
    from cadenza.cli.failures import interruptible
    from cadenza.core.errors import CadenzaError
    from cadenza.core.files import require_folder

    require_folder(directory, "folder to work on", "check the path")
    require_folder(model, "model directory", MODEL_MEND)
    with interruptible("the agent worked", "nothing in DIR was changed; run the same command to begin again"):
        from cadenza.pipelines.assist import assist, readable_step

        def show(entry: dict[str, Any]) -> None:
            line = readable_step(entry)
            if line is not None and not as_json:
                typer.echo(line, err=True)

        work = assist(directory, task, model, temperature=temperature, seed=seed, on_step=show)
    written: list[str] = []
    refused: CadenzaError | None = None
    if apply:
        try:
            written = work.apply()
        except CadenzaError as error:  # told once the patch is printed: it is the only copy of the work
            refused = error
    if as_json:
        facts = {
            "finish_reason": work.result.finish_reason,
            "changed": sorted(work.changes),
            "written": written,
        }
        typer.echo(json.dumps({**facts, "patch": work.patch, "counters": work.result.counters}))
    else:
        typer.echo(work.patch, nl=False)
        counters = work.result.counters
        calls = sum(tool["calls"] for tool in counters["tools"].values())
        ended = REASONS.get(work.result.finish_reason, work.result.finish_reason)
        changed = ", ".join(sorted(work.changes)) or "nothing"
        told = f"{_count(counters['turns'], 'turn')}, {_count(calls, 'tool call')}, {ended}"
        typer.echo(f"the agent changed {changed}: {told}", err=True)
    if refused is not None:
        raise refused


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
