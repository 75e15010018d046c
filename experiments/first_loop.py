"""The claims of the first loop: RL improves the agent over SFT, and over SFT continued for the same wall time.

    python experiments/first_loop.py                     everything that is not done yet (about 90 minutes a seed)
    python experiments/first_loop.py --list              what is done, what remains
    python experiments/first_loop.py --only-arm rl --seed 1
    python experiments/first_loop.py --pool              only the figures, from what is done
    python experiments/first_loop.py --restart --seed 1  seed 1 from the beginning; with --only-arm from that arm on

An arm of a seed is done when docs/results/first_loop/<arm>-seed<k>.json exists; it is written the moment the arm
ends, so that each can be committed and the rest run another day. Its curves lie beside it in <arm>-seed<k>/. Figures
go to docs/results/first_loop.jsonl.
Nothing here looks at held-out tasks before the arm `eval`, and temperatures are chosen on validation tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.core.config import digest_of
from cadenza.core.errors import CadenzaError, ConfigError, CorruptArtifact, MissingArtifact
from cadenza.core.files import write_bytes, write_json
from cadenza.core.machine import commit
from cadenza.core.progress import make_progress
from cadenza.evaluation.comparison import VIEWS, Results, View
from cadenza.evaluation.figures import Figure, command_line, line, machine, points, write_figures
from cadenza.evaluation.report_inputs import Metrics, read_metrics
from cadenza.evaluation.result import EvalResult
from cadenza.evaluation.statistics import Estimate
from cadenza.pipelines import Plan, plan_recipe, run_plan
from cadenza.pipelines.run_folder import RunFolder

FORMAT_VERSION = 1
RECIPE = "proof"
SEEDS = (0, 1, 2)
BUDGET_KEY = "sft_continued.budget_s"  # the wall time that RL took, so that both arms had the same
LEAST_TASKS = 200  # of the main view: with fewer the claim is not tested
MAX_CURVE_BYTES = 200_000  # of one metric file kept in the repository; longer ones are thinned
BARS = {"rl_gain_points": 8.0, "greedy_change_points": -5.0, "best8_change_points": -5.0}


@dataclass(frozen=True)
class Arm:
    """A part of the experiment that is run, recorded and resumed by itself.

    ``stages``: names, or beginnings of names, of the recipe's stages it runs; ``after``: arms it builds on.
    """

    name: str
    stages: tuple[str, ...]
    after: tuple[str, ...] = ()


ARMS = (
    Arm("prepare", ("tasks", "base", "cpt", "sft")),
    Arm("rl", ("rl",), ("prepare",)),
    Arm("sft_continued", ("sft_continued",), ("prepare", "rl")),
    # One stage a thread split (rl_sync_1x1, rl_sync_2x2, ...): the fastest is what async is compared with.
    Arm("rl_sync", ("rl_sync_*",), ("prepare",)),
    Arm("eval", ("eval",), ("prepare", "rl", "sft_continued")),
)


@dataclass(frozen=True)
class StageRun:
    """What the runner hands back of one stage."""

    name: str
    folder: Path
    seconds: float


class FirstLoop:
    """Arms x seeds, their records, and the figures pooled from them."""

    def __init__(
        self, results: Path, runs: Path, recipe: str = RECIPE, overrides: Sequence[str] = ()
    ) -> None:
        self.results, self.runs = results, runs
        self.recipe, self.overrides = recipe, tuple(overrides)

    def record_path(self, arm: str, seed: int) -> Path:
        return self.results / "first_loop" / f"{arm}-seed{seed}.json"

    def curves_path(self, arm: str, seed: int) -> Path:
        return self.record_path(arm, seed).with_suffix("")

    def record(self, arm: str, seed: int) -> dict[str, Any] | None:
        """The record of a finished arm, None when it is not done. Raises CorruptArtifact."""
        path = self.record_path(arm, seed)
        if not path.exists():
            return None
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            if body["format_version"] != FORMAT_VERSION or (body["arm"], body["seed"]) != (arm, seed):
                raise ValueError("another format or arm")
            parts = {"design": str, "stages": dict, "evaluations": list, "curves": list}
            if strange := [name for name, kind in parts.items() if not isinstance(body[name], kind)]:
                raise TypeError(f"{', '.join(strange)} is no such thing")
            [float(stage["seconds"]) for stage in body["stages"].values()]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptArtifact(
                f"{path} is no record: {error}", f"restore it, or add {_restart(arm, seed)} to make it again"
            ) from None
        return body

    def plan(self, seed: int) -> Plan:
        """The whole recipe for one seed, with the budget of `sft_continued` once RL has set it."""
        rl = self.record("rl", seed)
        budget = [f"{BUDGET_KEY}={rl['stages']['rl']['seconds']}"] if rl else []
        return plan_recipe(self.recipe, [f"seed={seed}", *self.overrides, *budget])

    def run_folder(self, plan: Plan, seed: int) -> Path:
        return self.runs / f"{plan.name}-seed{seed}"

    @functools.cached_property
    def design(self) -> str:
        """Digest of what must be equal in all records that are pooled: the recipe without seed and budget."""
        plan = plan_recipe(self.recipe, self.overrides)
        return digest_of({s.name: {k: v for k, v in s.settings.items() if k != "seed"} for s in plan.stages})

    def require_design(self, arm: Arm, seed: int) -> None:
        """Raises ConfigError when the record of an arm, or one it builds on, is of another configuration."""
        for name in (*arm.after, arm.name):
            record = self.record(name, seed)
            if record is not None and record["design"] != self.design:
                raise ConfigError(
                    f"{self.record_path(name, seed)} was made with another configuration than this command has",
                    f"give the recipe and --set it was made with, or add {_restart(name, seed)} to make it again",
                )

    def run(self, arm: Arm, seed: int) -> None:
        """Runs an arm and records it, unless its record is there. Raises ConfigError when an arm before it is
        missing or of another configuration, or what a stage raises."""
        self.require_design(arm, seed)
        if self.record(arm.name, seed) is not None:
            return
        waiting = [name for name in arm.after if self.record(name, seed) is None]
        if waiting:
            raise ConfigError(
                f"arm {arm.name!r} of seed {seed} needs {', '.join(waiting)} first",
                f"run --only-arm {waiting[0]} --seed {seed}",
            )
        print(f"arm {arm.name}, seed {seed}", file=sys.stderr, flush=True)
        stages = self.execute(arm, seed)
        body = {
            "format_version": FORMAT_VERSION,
            "arm": arm.name,
            "seed": seed,
            "design": self.design,
            "stages": {s.name: {"seconds": s.seconds, **_speed(s)} for s in stages},
            "evaluations": self._keep_evaluations(stages, seed) if arm.name == "eval" else [],
            "curves": keep_curves(stages, self.curves_path(arm.name, seed)),
            "machine": machine(),
            "commit": commit(),
            "command": command_line(),
        }
        write_json(self.record_path(arm.name, seed), body)

    def restart(self, arms: Collection[str], seed: int) -> None:
        """Removes what was made of these arms and of those that build on them, after saying what: their records,
        what lies beside these, and their stages in the run folder."""
        gone: list[Arm] = []
        for arm in ARMS:
            if arm.name in arms or any(earlier.name in arm.after for earlier in gone):
                gone.append(arm)
        plan = plan_recipe(self.recipe, [f"seed={seed}", *self.overrides])
        stages = [name for arm in gone for name in stages_of(arm, plan)]
        folder = RunFolder(self.run_folder(plan, seed))
        names = ", ".join(arm.name for arm in gone)
        print(
            f"seed {seed}: removing the records of {names} and, in {folder.path}, {', '.join(stages)}",
            file=sys.stderr,
        )
        for arm in gone:
            self.record_path(arm.name, seed).unlink(missing_ok=True)
            if self.curves_path(arm.name, seed).exists():
                shutil.rmtree(self.curves_path(arm.name, seed))
            if arm.name == "eval":
                for path in (self.results / "first_loop" / "evaluations").glob(f"*-seed{seed}.json"):
                    path.unlink()
        if folder.exists:
            with folder.lock():
                folder.clear(stages)

    def execute(self, arm: Arm, seed: int) -> list[StageRun]:
        """Runs the arm's stages, and whatever before them is not finished, in runs/<recipe's name>-seed<k>."""
        plan = self.plan(seed)
        wanted = named_stages(arm, plan)
        if not wanted:
            raise ConfigError(
                f"recipe {self.recipe!r} has no stage for arm {arm.name!r}",
                f"name one of its stages {' or '.join(arm.stages)}",
            )
        folder = self.run_folder(plan, seed)
        self._require_artifacts(arm, plan, seed)
        try:
            outcome = run_plan(part_of(plan, wanted), folder, make_progress())
        except (ConfigError, CorruptArtifact) as error:
            raise self._mended(error, plan, folder, seed) from error
        return [StageRun(s.name, s.path, s.seconds) for s in outcome.stages if s.name in wanted]

    def _require_artifacts(self, arm: Arm, plan: Plan, seed: int) -> None:
        """Raises ConfigError when a recorded arm's stages are no longer there: made again they would be other models
        than those the record speaks of."""
        for earlier in (a for a in ARMS if a.name in arm.after):
            for stage in named_stages(earlier, plan):
                folder = self.run_folder(plan, seed) / stage
                if not folder.is_dir():
                    raise ConfigError(
                        f"arm {earlier.name!r} of seed {seed} is recorded, but {folder} is not there",
                        f"bring it back, or add {_restart(earlier.name, seed)} to make it again",
                    )

    def _mended(self, error: CadenzaError, plan: Plan, folder: Path, seed: int) -> CadenzaError:
        """The runner's error with a mend in the words of this command, which has other options than the runner's."""
        stage = re.search(r"--restart-from (\S+)", error.mend)
        if stage is None and "--run-dir" not in error.mend:
            return error
        owner = next((a.name for a in ARMS if stage and stage[1] in stages_of(a, plan)), None)
        again = f"add {_restart(owner, seed)} to make it again, or " if owner else ""
        return type(error)(f"{folder}: {error.cause}", f"{again}give another folder with --runs")

    def _keep_evaluations(self, stages: Sequence[StageRun], seed: int) -> list[str]:
        """Copies EvalResults beside the record, so that figures need no run folder. Returns their names."""
        target = self.results / "first_loop" / "evaluations"
        target.mkdir(parents=True, exist_ok=True)
        kept = []
        for path in sorted(p for s in stages for p in (s.folder / "evaluations").glob("*.json")):
            if EvalResult.load(path).seed != seed:
                raise CorruptArtifact(f"{path} is of another seed than {seed}", "evaluate again")
            name = f"{path.stem}-seed{seed}.json"
            shutil.copyfile(path, target / name)
            kept.append(name)
        if not kept:
            raise MissingArtifact(
                "the eval stage left no evaluations/*.json", "check the recipe's eval stage"
            )
        return kept

    def pool(self) -> list[Figure]:
        """All figures that can be computed, from the seeds that have what each needs. Raises ConfigError when
        records of different configurations would be mixed."""
        records = {(a.name, k): r for a in ARMS for k in SEEDS if (r := self.record(a.name, k))}
        if len({r["design"] for r in records.values()}) > 1:
            strange = [f"{arm}-seed{k}" for (arm, k), r in records.items() if r["design"] != self.design]
            arm, seed = next(key for key, r in records.items() if r["design"] != self.design)
            raise ConfigError(
                f"records in {self.results / 'first_loop'} come from different configurations; "
                f"not of this command's: {', '.join(strange)}",
                f"make those again, each seed with --restart, for example {_restart(arm, seed)}",
            )
        return [*self._gains(records), *_busy(records), *self._against_synchronous(records)]

    def _gains(self, records: Mapping[tuple[str, int], dict[str, Any]]) -> list[Figure]:
        folder = self.results / "first_loop" / "evaluations"
        done = [r for (arm, _), r in records.items() if arm == "eval"]
        results = Results([EvalResult.load(folder / name) for r in done for name in r["evaluations"]])
        view = {v.key: v for v in VIEWS}
        asked: list[tuple[str, View, str, str, int, bool]] = [
            ("rl_gain_points", view["heldout"], "rl", "sft", 1, False),
            ("rl_vs_sft_continued_points", view["heldout"], "rl", "sft_continued", 1, False),
            ("greedy_change_points", view["heldout"], "rl", "sft", 1, True),
            ("best8_change_points", view["heldout"], "rl", "sft", 8, False),
            ("unseen_family_gain_points", view["unseen"], "rl", "sft", 1, False),
            ("hard_split_gain_points", view["hard"], "rl", "sft", 1, False),
        ]
        figures = []
        for name, tasks, new, old, k, greedy in asked:
            change = results.change(tasks, new, old, k=k, greedy=greedy)
            if change is not None:
                seeds = results.common_seeds(tasks, new, old, greedy=greedy)
                figures.append(points(name, change, seeds=seeds, note=_note(name, change, tasks)))
        return figures

    def _against_synchronous(self, records: Mapping[tuple[str, int], dict[str, Any]]) -> list[Figure]:
        """The pace of the asynchronous run against the better synchronous one, in as many seconds from the start: later
        runs take more turns, which is slower for either. Mean over seeds. Raises CorruptArtifact."""
        ratios, whole, paces = {}, {}, []
        for arm, seed in records:
            if arm != "rl_sync" or ("rl", seed) not in records:
                continue
            (rl,) = self._curves("rl", seed, records)
            best, span_s = max(pace(curve) for curve in self._curves(arm, seed, records))
            (same, _), (all_of_it, _) = pace(rl, span_s), pace(rl)
            if best:
                ratios[seed], whole[seed] = same / best, all_of_it / best
                paces.append(best)
        if not ratios:
            return []
        ratio = _average("async_vs_sync", ratios, "x")
        told = ", ".join(f"{v:.3g}" for v in whole.values())
        peer = {
            "peer": "the same run, synchronous, best thread split, rollouts/s",
            "peer_value": sum(paces) / len(paces),
            "note": f"{ratio.note}; the whole asynchronous run against the start of the synchronous one: {told}",
        }
        return [ratio.model_copy(update=peer)]

    def _curves(
        self, arm: str, seed: int, records: Mapping[tuple[str, int], dict[str, Any]]
    ) -> list[Metrics]:
        """The metrics kept of an arm. Raises CorruptArtifact when some are not there or not whole: without them a
        figure would be another one."""
        problems: list[str] = []
        found = []
        for name in records[arm, seed]["curves"]:
            if name.endswith(".jsonl"):
                path = self.curves_path(arm, seed) / name
                curve = read_metrics(path, problems)
                if problems or len(curve.series("rollouts_trained", x="t")[0]) == 0:
                    told = "; ".join(problems) or "no step is in it"
                    raise CorruptArtifact(
                        f"{path} cannot be used ({told})", f"restore it, or add {_restart(arm, seed)}"
                    )
                found.append(curve)
        return found


def part_of(plan: Plan, wanted: Sequence[str]) -> Plan:
    """The plan cut down to `wanted` and every stage they read, directly or not, in order."""
    keep = set(wanted)
    for planned in reversed(plan.stages):
        if planned.name in keep:
            keep |= {source for source in planned.inputs.values() if isinstance(source, str)}
    return dataclasses.replace(plan, stages=tuple(s for s in plan.stages if s.name in keep))


def named_stages(arm: Arm, plan: Plan) -> list[str]:
    """The stages of the plan that an arm names."""
    return [s.name for s in plan.stages if any(_fits(s.name, pattern) for pattern in arm.stages)]


def stages_of(arm: Arm, plan: Plan) -> list[str]:
    """The stages an arm runs when the arms before it are done: those it names and what these need."""
    before = [name for a in ARMS if a.name in arm.after for name in named_stages(a, plan)]
    earlier = {s.name for s in part_of(plan, before).stages}
    return [s.name for s in part_of(plan, named_stages(arm, plan)).stages if s.name not in earlier]


def keep_curves(stages: Sequence[StageRun], target: Path) -> list[str]:
    """Copies the stages' metrics, thinned where they are long, and tables of tried temperatures. Returns the names."""
    target.mkdir(parents=True, exist_ok=True)
    kept = []
    for folder in [s.folder for s in stages]:
        for path in sorted((folder / "metrics").glob("*.jsonl")):
            problems: list[str] = []
            write_bytes(target / path.name, read_metrics(path, problems).thinned(MAX_CURVE_BYTES).encode())
            kept.append(path.name)
            for problem in problems:
                print(f"curves: {problem}", file=sys.stderr)
        for path in sorted(folder.glob("temperature-*.json")):
            write_bytes(target / path.name, path.read_bytes())
            kept.append(path.name)
    return kept


def _restart(arm: str, seed: int) -> str:
    return f"--restart --seed {seed} --only-arm {arm}"


def _fits(stage: str, pattern: str) -> bool:
    return stage.startswith(pattern[:-1]) if pattern.endswith("*") else stage == pattern


def _speed(stage: StageRun) -> dict[str, float]:
    """Busy shares and rollouts a second of an RL stage, from its metrics; empty for any other stage."""
    path = stage.folder / "metrics" / f"{stage.name}.jsonl"
    if not stage.name.startswith("rl") or not path.exists():
        return {}
    metrics = read_metrics(path)
    # Busy shares are since the start: the last row speaks of the whole run.
    found = {name: metrics.last(name) for name in ("trainer_busy", "engine_busy", "env_busy")}
    found["rollouts_per_s"] = pace(metrics)[0] or None
    return {name: value for name, value in found.items() if value is not None}


def pace(metrics: Metrics, span_s: float = math.inf) -> tuple[float, float]:
    """Rollouts of finished groups a second within ``span_s`` of the end of the first step (the start, with compilation
    and the first batch, is no part of the pace), and the seconds that were looked at; 0 with fewer than two steps."""
    times, trained = metrics.series("rollouts_trained", x="t")
    within = [(t, n) for t, n in zip(times, trained, strict=True) if t - times[0] <= span_s]
    if len(within) < 2:
        return 0.0, 0.0
    (first, before), (last, after) = within[0], within[-1]
    return (after - before) / (last - first), last - first


def _busy(records: Mapping[tuple[str, int], dict[str, Any]]) -> list[Figure]:
    """Busy shares of the services during RL, mean over seeds."""
    figures = []
    rl = {seed: r["stages"]["rl"] for (arm, seed), r in records.items() if arm == "rl"}
    for name in ("trainer_busy", "engine_busy", "env_busy"):
        values = {seed: stage[name] for seed, stage in rl.items() if name in stage}
        if values:
            figures.append(_average(name, values, "share"))
    return figures


def _average(name: str, by_seed: Mapping[int, float], unit: str) -> Figure:
    value = sum(by_seed.values()) / len(by_seed)
    told = ", ".join(f"{v:.3g}" for v in by_seed.values())
    return Figure(
        figure=name, value=round(value, 4), unit=unit, better="higher", n=len(by_seed), seeds=tuple(by_seed),
        note=f"by seed: {told}",
    )  # fmt: skip


def _note(name: str, change: Estimate, view: View) -> str:
    """Per-seed values, and whether the bar of the claim is met: the gain itself, or the lower bound of a change."""
    told = f"by seed: {', '.join(f'{100 * v:.1f}' for v in change.per_seed)}"
    value, low, _ = change.points()
    if view.key == "heldout" and change.n_tasks < LEAST_TASKS:
        return f"{told}; bar: not tested, {change.n_tasks} tasks are fewer than {LEAST_TASKS}"
    if view.key == "hard":
        return told  # no bar was set for it
    if name == "rl_gain_points":
        met = value >= BARS[name] and low > 0
        return f"{told}; bar: at least {BARS[name]:g} and interval above 0: {'met' if met else 'missed'}"
    if name in BARS:
        return f"{told}; bar: lower bound above {BARS[name]:g}: {'met' if low > BARS[name] else 'missed'}"
    return f"{told}; bar: interval above 0: {'met' if low > 0 else 'missed'}"


def show(loop: FirstLoop, seeds: Sequence[int]) -> None:
    """Prints what is done with its time, and what remains."""
    from rich.console import Console
    from rich.table import Table

    table = Table("arm", *(f"seed {k}" for k in seeds))
    for arm in ARMS:
        cells = []
        for k in seeds:
            record = loop.record(arm.name, k)
            waits = [name for name in arm.after if loop.record(name, k) is None]
            minutes = sum(s["seconds"] for s in record["stages"].values()) / 60 if record else 0.0
            if record is not None:
                cells.append(
                    f"done, {minutes:.0f} min"
                    if record["design"] == loop.design
                    else "of another configuration"
                )
            else:
                cells.append(f"after {', '.join(waits)}" if waits else "ready")
        table.add_row(arm.name, *cells)
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--only-arm", choices=[a.name for a in ARMS], action="append", help="run these arms only"
    )
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append", help="run these seeds only")
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
    parser.add_argument("--recipe", default=RECIPE, help="name or path of the recipe (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where run folders lie")
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="where results are kept")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of the error, which is printed on one line."""
    args = _parser().parse_args(argv)
    loop = FirstLoop(args.results, args.runs, args.recipe, args.set)
    seeds = args.seed or list(SEEDS)
    arms = [arm for arm in ARMS if not args.only_arm or arm.name in args.only_arm]
    try:
        if args.list:
            show(loop, seeds)
            return 0
        if args.pool and (args.restart or not args.results.is_dir()):
            raise ConfigError(
                "--pool only reads what is recorded"
                if args.restart
                else f"there are no results in {args.results}",
                "leave out --restart" if args.restart else "check --results",
            )
        if args.pool and (args.set or args.recipe != RECIPE):
            for seed in seeds:
                for arm in arms:
                    loop.require_design(arm, seed)
        if not args.pool:
            _run(loop, arms, seeds, restart=args.restart, seeds_given=bool(args.seed))
        figures = loop.pool()
        if figures:
            write_figures(args.results / "first_loop.jsonl", figures)
        for figure in figures:
            print(line(figure) if args.json else _readable(figure))
    except CadenzaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(
    loop: FirstLoop, arms: Sequence[Arm], seeds: Sequence[int], *, restart: bool, seeds_given: bool
) -> None:
    if restart:
        if not seeds_given:
            raise ConfigError("--restart removes what took hours", "say of which seed with --seed K")
        for seed in seeds:
            loop.restart([arm.name for arm in arms], seed)
    for seed in seeds:  # all before the first run: a stranger found at the end would have cost hours
        for arm in arms:
            loop.require_design(arm, seed)
    for seed in seeds:  # a seed at a time: the first pooled figures come after a third of the time
        for arm in arms:
            loop.run(arm, seed)


def _readable(figure: Figure) -> str:
    span = f" [{figure.interval[0]:g}, {figure.interval[1]:g}]" if figure.interval else ""
    seeds = ",".join(map(str, figure.seeds))
    return f"{figure.figure:28} {figure.value:g} {figure.unit}{span}  seeds {seeds}  ({figure.note})"


if __name__ == "__main__":
    sys.exit(main())
