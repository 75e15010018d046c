"""``cadenza eval``: measures a model on tasks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
[bold]Examples[/bold]

cadenza eval runs/demo/realtime --tasks runs/demo/tasks/heldout

cadenza eval runs/demo/sft --tasks runs/demo/tasks/heldout --samples 8 --temperature 0.7 --json > sft.json

cadenza eval runs/demo/realtime --tasks runs/demo/tasks/heldout --limit 20        a quick look at 20 tasks
"""


def _finite(value: float) -> float:
    if not math.isfinite(value):  # click compares with its bounds, which a NaN passes
        raise typer.BadParameter(f"{value} is no temperature")
    return value


Temperature = Annotated[
    float, typer.Option("--temperature", min=0.0, callback=_finite, help="Of sampling; 0 is greedy.")
]
MODEL_MEND = "give the folder of a trained model: `make demo` leaves some in runs/demo/sft, rl and realtime"


def evaluate(
    model: Annotated[
        Path, typer.Argument(help="The model's folder (Hugging Face layout, with its tokenizer).")
    ],
    tasks: Annotated[Path, typer.Option("--tasks", help="A folder of task directories.")],
    samples: Annotated[int, typer.Option("--samples", min=1, help="Attempts at each task.")] = 1,
    temperature: Temperature = 0.0,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N tasks.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write every record to this JSON file.", dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure a model: pass@1 with its interval, graded in fresh sandboxes."""
    from cadenza.cli.failures import interruptible
    from cadenza.core.files import require_folder, require_writable
    from cadenza.core.progress import make_progress

    require_folder(model, "model directory", MODEL_MEND)
    require_folder(
        tasks,
        "task directory",
        "give a folder that the tasks stage made, for example runs/demo/tasks/heldout",
    )
    if out is not None:
        require_writable(out, "choose another --out")
    with interruptible("measuring", "nothing was kept; run the same command to measure again"):
        from cadenza.pipelines.measure import figures_of, measure_model, sentence

        result, engine = measure_model(
            model,
            tasks,
            samples=samples,
            temperature=temperature,
            limit=limit,
            seed=seed,
            progress=make_progress(quiet=as_json),
        )
    figures = figures_of(result, engine)
    typer.echo(json.dumps(figures) if as_json else sentence(figures))
    if out is not None:  # after the figures, which a disk that has filled up meanwhile must not take along
        result.save(out)
