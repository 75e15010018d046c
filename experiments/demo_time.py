"""How long the demo takes: the wall time of `make demo` and `make demo QUICK=1` after installation, one run each.

    python experiments/demo_time.py --quick         quick_wall_s
    python experiments/demo_time.py --full          demo_wall_s
    python experiments/demo_time.py --quick --full  both

Figures go to docs/results/demo.jsonl, where a figure that is measured again replaces the older one and the other stays.
A run folder that exists already is refused, since a run that goes on in the middle takes less time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cadenza.core.errors import CadenzaError, ConfigError
from cadenza.core.machine import commit
from cadenza.evaluation.figures import Figure, line, read_figures, write_figures
from cadenza.pipelines import plan_recipe

ROOT = Path(__file__).parent.parent
INTERRUPTED = 130


@dataclass(frozen=True)
class Demo:
    """One way to run the demo: the figure it gives, its recipe, and what follows `make`."""

    figure: str
    recipe: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """As a user types it."""
        return " ".join(["make", *self.arguments])


QUICK = Demo("quick_wall_s", "demo-quick", ("demo", "QUICK=1"))
FULL = Demo("demo_wall_s", "demo", ("demo",))


def wall_time(demo: Demo, root: Path, code: str) -> Figure:
    """Runs the demo in the checkout at ``root``, which is of commit ``code``, from nothing, with the installation done
    before the clock starts.

    Raises ConfigError when its run folder is there already, CadenzaError when make fails.
    """
    folder = root / "runs" / demo.recipe
    if folder.exists():
        raise ConfigError(
            f"{folder} is there already, and the rest of a run is no whole one",
            f"remove {folder}, or move it away",
        )
    _make("install", root=root)
    begun = time.monotonic()
    _make(*demo.arguments, root=root)
    seconds = time.monotonic() - begun
    return Figure(
        figure=demo.figure, value=round(seconds, 1), unit="s", better="lower", n=1,
        seeds=(plan_recipe(demo.recipe).seed,), commit=code, command=demo.command,
    )  # fmt: skip


def _make(*arguments: str, root: Path) -> None:
    done = subprocess.run(["make", *arguments], cwd=root, check=False)
    if done.returncode != 0:
        command = " ".join(["make", *arguments])
        raise CadenzaError(
            f"{command} ended with status {done.returncode}", "mend what it says above, then measure again"
        )


def record(path: Path, figure: Figure) -> None:
    """Puts the figure in the place of an older one of the same name; the other lines stay as they are."""
    older = read_figures(path) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    write_figures(path, [*(f for f in older if f.figure != figure.figure), figure])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of the error, which is printed on one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="time `make demo QUICK=1`")
    parser.add_argument("--full", action="store_true", help="time `make demo`")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to run in")
    parser.add_argument("--results", type=Path, help="where results are kept (default: docs/results of it)")
    args = parser.parse_args(argv)
    wanted = [demo for demo, asked in ((QUICK, args.quick), (FULL, args.full)) if asked]
    if not wanted:
        parser.error("say --quick, --full or both")
    path = (args.results or args.root / "docs" / "results") / "demo.jsonl"
    code = (
        commit(args.root) or ""
    )  # before the first: what runs and their records write is no change of the code
    try:
        for demo in wanted:
            figure = wall_time(demo, args.root, code)
            record(path, figure)  # at once: the next run may be stopped
            print(line(figure))
    except CadenzaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            f"error: interrupted; remove {args.root / 'runs' / demo.recipe}, then measure again",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
