"""The command of a claim: which arms of which seeds to run, show or pool, and the figures that come of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from arms import Arm, Claim

from cadenza.core.errors import CadenzaError, ConfigError
from cadenza.evaluation.figures import Figure, line, write_figures


def show(claim: Claim, seeds: Sequence[int]) -> None:
    """Prints what is done with its time, and what remains."""
    from rich.console import Console
    from rich.table import Table

    table = Table("arm", *(f"seed {k}" for k in seeds))
    for arm in claim.arms:
        table.add_row(arm.name, *(_standing(claim, arm, k) for k in seeds))
    Console().print(table)


def _standing(claim: Claim, arm: Arm, seed: int) -> str:
    """Whether an arm of a seed is done, can be run, or what keeps it from that."""
    record = claim.record(arm.name, seed)
    if record is not None:
        minutes = sum(s["seconds"] for s in record["stages"].values()) / 60
        other = claim.other(arm.name, record)
        return f"of {other}" if other else f"done, {minutes:.0f} min"
    earlier = {name: claim.record(name, seed) for name in arm.after}
    waits = [name for name, found in earlier.items() if found is None]
    strange = {
        name: other for name, found in earlier.items() if found and (other := claim.other(name, found))
    }
    told = [f"after {', '.join(waits)}"] if waits else []
    told += [f"{name} of {other}" for name, other in strange.items()]
    return "; ".join(told) or "ready"


def _parser(claim: type[Claim], about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about.split("\n\n")[0])
    parser.add_argument(
        "--only-arm", choices=[a.name for a in claim.arms], action="append", help="run these arms only"
    )
    parser.add_argument("--seed", type=int, choices=claim.seeds, action="append", help="run these seeds only")
    parser.add_argument("--list", action="store_true", help="show what is done and what remains, run nothing")
    parser.add_argument("--pool", action="store_true", help="only compute the figures of what is done")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="first remove what was made of the arms (all, or those of --only-arm and what builds on them) of --seed",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON lines")
    parser.add_argument(
        "--set", action="append", default=[], metavar="K=V", help="change a value of the recipe"
    )
    parser.add_argument(
        "--recipe", default=claim.recipe, help="name or path of the recipe (default: %(default)s)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where run folders lie")
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="where results are kept")
    return parser


def main_of(claim: type[Claim], about: str, argv: Sequence[str] | None = None) -> int:
    """The command of a claim. Exit code 0, or that of the error, which is printed on one line."""
    args = _parser(claim, about).parse_args(argv)
    made = claim(args.results, args.runs, args.recipe, args.set)
    seeds = args.seed or list(claim.seeds)
    arms = [arm for arm in claim.arms if not args.only_arm or arm.name in args.only_arm]
    try:
        if args.list:
            show(made, seeds)
            return 0
        if args.pool and (args.restart or not args.results.is_dir()):
            raise ConfigError(
                "--pool only reads what is recorded"
                if args.restart
                else f"there are no results in {args.results}",
                "leave out --restart" if args.restart else "check --results",
            )
        if args.pool and (args.set or args.recipe != claim.recipe):
            for seed in seeds:
                for arm in arms:
                    made.require_design(arm, seed)
        if not args.pool:
            asked = bool(args.only_arm or args.seed or args.set or args.recipe != claim.recipe)
            _run(made, arms, seeds, restart=args.restart, seeds_given=bool(args.seed), asked=asked)
        figures = made.pool()
        if figures:
            write_figures(args.results / f"{claim.name}.jsonl", figures)
        tell(figures, args.json)
    except CadenzaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(
    claim: Claim, arms: Sequence[Arm], seeds: Sequence[int], *, restart: bool, seeds_given: bool, asked: bool
) -> None:
    """``asked``: somebody named what is to run, so that a record of another configuration is an error. Otherwise its
    seed is finished and left as it is: a later version of the program does not spoil what an earlier one has shown."""
    if restart and not seeds_given:
        raise ConfigError("--restart removes what took hours", "say of which seed with --seed K")
    names = [arm.name for arm in arms]
    again = claim.with_dependents(names) if restart else []
    left = [seed for seed in seeds if restart or _alike(claim, arms, seed, asked=asked)]
    # All before the first removal and the first run: a stranger found at the end would have cost hours.
    claim.require_alike(arms, left, {(arm.name, seed) for arm in again for seed in seeds})
    for seed in seeds if restart else ():
        claim.restart(names, seed)
    for seed in left:  # a seed at a time: the first pooled figures come after a third of the time
        for arm in arms:
            claim.run(arm, seed)


def _alike(claim: Claim, arms: Sequence[Arm], seed: int, *, asked: bool) -> bool:
    """Whether what a seed has is as this command would make it; for one that was ``asked`` for, anything else is a
    ConfigError."""
    try:
        for arm in arms:
            claim.require_design(arm, seed)
    except ConfigError:
        if asked:
            raise
        mend = f"--restart --seed {seed} makes it again"
        print(f"seed {seed}: recorded with an earlier configuration, left as it is; {mend}", file=sys.stderr)
        return False
    return True


def tell(figures: Sequence[Figure], as_json: bool) -> None:
    """Prints them, one a line."""
    for figure in figures:
        print(line(figure) if as_json else _readable(figure))


def _readable(figure: Figure) -> str:
    span = f" [{figure.interval[0]:g}, {figure.interval[1]:g}]" if figure.interval else ""
    seeds = ",".join(map(str, figure.seeds))
    return f"{figure.figure:28} {figure.value:g} {figure.unit}{span}  seeds {seeds}  ({figure.note})"
