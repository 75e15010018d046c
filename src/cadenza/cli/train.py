"""``cadenza train``: runs a recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
[bold]Examples[/bold]

cadenza train --list                          the recipes there are

cadenza train demo-quick                      a short run, to see that everything works

cadenza train demo --set rl.max_steps=40      change one value

cadenza train demo --set seed=1 --run-dir runs/demo-1

cadenza train demo --dry-run > mine.toml      the whole recipe with every default, to edit

cadenza train ./mine.toml --restart-from rl   make the stage rl and what reads it again

Stop it at any moment and give the same command again: it goes on from the last finished stage or RL step.
"""


def _complete_recipe(incomplete: str) -> list[str]:
    from cadenza.core.recipes import recipe_names
    from cadenza.pipelines.plan import recipe_folders

    return [name for name in recipe_names(recipe_folders()) if name.startswith(incomplete)]


def _complete_stage(ctx: typer.Context, incomplete: str) -> list[str]:
    from cadenza.core.errors import CadenzaError
    from cadenza.pipelines.plan import plan_recipe

    # Where the word before has no value yet, the recipe is still among what was not read.
    recipe = ctx.params.get("recipe") or next(iter(ctx.args), None)
    try:
        plan = plan_recipe(recipe, ctx.params.get("sets") or []) if recipe else None
    except CadenzaError:  # the command itself will tell it
        plan = None
    return [stage.name for stage in plan.stages if stage.name.startswith(incomplete)] if plan else []


def _list_recipes(asked: bool) -> None:
    if not asked:
        return
    from cadenza.core.errors import CadenzaError
    from cadenza.core.recipes import recipe_names
    from cadenza.pipelines.plan import plan_recipe, recipe_folders

    for name in recipe_names(recipe_folders()):
        try:
            plan = plan_recipe(name)
        except CadenzaError as error:  # one of the user's own; it must not hide the others
            typer.echo(f"{name:<14}cannot be used: {error.cause}")
        else:
            if plan.stages:  # else it is only extended by others
                typer.echo(f"{name:<14}{plan.description}")
    raise typer.Exit()


def _command(recipe: str, sets: Sequence[str], run_dir: Path | None) -> str:
    """What goes on with the run, given in the same folder; how this attempt began (``--fresh``, ``--restart-from``,
    ``--resume``) is left out, because given again it would throw away what was made."""
    words = ["cadenza", "train", recipe]
    for text in sets:
        words += ["--set", text]
    return shlex.join(words + (["--run-dir", str(run_dir)] if run_dir else []))


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe's name (in ./recipes or shipped, see --list) or a path to a TOML file.",
            autocompletion=_complete_recipe,
            show_default=False,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change one key: STAGE.KEY=VALUE or KEY=VALUE. Repeatable."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print it with every default, then stop.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Refuse to begin a new run: without it, a run is begun if there is none."
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Throw away what the run has made and begin anew.")
    ] = False,
    restart_from: Annotated[
        str | None,
        typer.Option(
            "--restart-from",
            metavar="STAGE",
            help="Make this stage and what reads it again.",
            autocompletion=_complete_stage,
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Where the run lives. Default: runs/NAME.", file_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    list_recipes: Annotated[
        bool,
        typer.Option("--list", callback=_list_recipes, is_eager=True, help="List the recipes and stop."),
    ] = False,
) -> None:
    """Run a recipe: from tasks to a trained and measured agent."""
    del list_recipes  # done by its callback
    from cadenza.core.errors import ConfigError
    from cadenza.pipelines.plan import plan_recipe

    if recipe is None:
        raise ConfigError("no recipe was named", "name one of those that cadenza train --list shows")
    if fresh and (resume or restart_from):
        raise typer.BadParameter("--fresh excludes --resume and --restart-from")
    plan = plan_recipe(recipe, sets or [])
    if restart_from is not None:
        plan.stage_named(restart_from)
    if dry_run:
        plan.require_inputs()
        typer.echo(json.dumps(plan.resolved()) if as_json else plan.toml(), nl=as_json)
        return

    from cadenza.cli.failures import keep_traces_in
    from cadenza.core.progress import clock, make_progress
    from cadenza.pipelines.runner import run_plan

    folder = run_dir or Path("runs") / plan.name
    keep_traces_in(folder)
    outcome = run_plan(
        plan, folder, make_progress(quiet=as_json), resume=resume, fresh=fresh, restart_from=restart_from,
        command=_command(recipe, sets or [], run_dir),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(outcome.to_plain()))
        return
    total = sum(stage.seconds for stage in outcome.stages)
    if all(stage.skipped for stage in outcome.stages):
        page = outcome.run_dir / "report.html"
        typer.echo(f"finished earlier: {outcome.run_dir}" + (f"\nReport  {page}" if page.is_file() else ""))
        return
    typer.echo(f"finished {plan.name} in {clock(total)}: {outcome.run_dir}")
