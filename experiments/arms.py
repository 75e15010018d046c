"""Claims that take hours: arms times seeds, each recorded the moment it ends, so that the rest can run another day.

An arm of a seed is done when docs/results/NAME/ARM-seedK.json exists. Its curves lie beside it in ARM-seedK/; what the
evaluating arm measured, in evaluations/. Figures go to docs/results/NAME.jsonl. Records of different configurations, or
of one arm under different conditions, are neither built on nor pooled.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from curves import keep_curves, speed

from cadenza.core.config import digest_of
from cadenza.core.errors import CadenzaError, ConfigError, CorruptArtifact, MissingArtifact
from cadenza.core.files import write_json
from cadenza.core.machine import commit
from cadenza.core.progress import make_progress
from cadenza.evaluation.comparison import Results
from cadenza.evaluation.figures import Figure, command_line, machine
from cadenza.evaluation.report_inputs import Metrics, read_metrics
from cadenza.evaluation.result import EvalResult
from cadenza.pipelines import Plan, plan_recipe, run_plan
from cadenza.pipelines.run_folder import RunFolder

FORMAT_VERSION = 1
Records = Mapping[tuple[str, int], dict[str, Any]]  # by arm and seed


@dataclass(frozen=True)
class Arm:
    """A part of the experiment that is run, recorded and resumed by itself.

    ``stages``: names, or beginnings of names, of the recipe's stages it runs; ``after``: arms it builds on.
    """

    name: str
    stages: tuple[str, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageRun:
    """What the runner hands back of one stage."""

    name: str
    folder: Path
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


class Claim:
    """Arms x seeds of one claim, their records, and the figures pooled from them.

    A claim sets the class attributes and says how figures come from records. ``name``: of its folder and its figures
    under docs/results. ``evaluated``: the arms whose evaluations are kept. ``conditions``: by arm, what decides its
    measurements besides the recipe.
    """

    name: ClassVar[str]
    recipe: ClassVar[str]
    arms: ClassVar[tuple[Arm, ...]]
    seeds: ClassVar[tuple[int, ...]] = (0, 1, 2)
    evaluated: ClassVar[tuple[str, ...]] = ("eval",)
    conditions: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(
        self, results: Path, runs: Path, recipe: str | None = None, overrides: Sequence[str] = ()
    ) -> None:
        self.results, self.runs = results, runs
        self.used, self.overrides = recipe or self.recipe, tuple(overrides)

    def overrides_for(self, seed: int) -> list[str]:
        """What earlier arms of the seed decide for later ones."""
        del seed
        return []

    def figures(self, records: Records) -> list[Figure]:
        """Every figure that can be computed from these records."""
        raise NotImplementedError

    def curves_of(self, arm: str, seed: int, records: Records) -> list[Metrics]:
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

    def results_of(self, records: Records) -> Results:
        """The evaluations that were kept."""
        folder = self.results / self.name / "evaluations"
        done = [r for (arm, _), r in records.items() if arm in self.evaluated]
        return Results([EvalResult.load(folder / name) for r in done for name in r["evaluations"]])

    def record_path(self, arm: str, seed: int) -> Path:
        return self.results / self.name / f"{arm}-seed{seed}.json"

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
            body.setdefault("conditions", {})  # records from before they were kept
            parts = {"design": str, "conditions": dict, "stages": dict, "evaluations": list, "curves": list}
            if strange := [name for name, kind in parts.items() if not isinstance(body[name], kind)]:
                raise TypeError(f"{', '.join(strange)} is no such thing")
            [float(stage["seconds"]) for stage in body["stages"].values()]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptArtifact(
                f"{path} is no record: {error}", f"restore it, or add {_restart(arm, seed)} to make it again"
            ) from None
        return body

    def plan(self, seed: int) -> Plan:
        """The whole recipe for one seed, with what its earlier arms have decided."""
        return plan_recipe(self.used, [f"seed={seed}", *self.overrides, *self.overrides_for(seed)])

    def run_folder(self, plan: Plan, seed: int) -> Path:
        return self.runs / f"{plan.name}-seed{seed}"

    @functools.cached_property
    def design(self) -> str:
        """Digest of what must be equal in all records that are pooled: the recipe without seed and budget."""
        plan = plan_recipe(self.used, self.overrides)
        return digest_of({s.name: {k: v for k, v in s.settings.items() if k != "seed"} for s in plan.stages})

    def other(self, arm: str, record: Mapping[str, Any]) -> str:
        """What of a record is not as this command would make it; "" when it is alike."""
        if record["design"] != self.design:
            return "another configuration"
        return "" if record["conditions"] == _plain(self.conditions.get(arm, {})) else "other conditions"

    def require_design(self, arm: Arm, seed: int) -> None:
        """Raises ConfigError when the record of an arm, or one it builds on, is of another configuration."""
        for name in (*arm.after, arm.name):
            record = self.record(name, seed)
            if record is not None and (other := self.other(name, record)):
                as_it_was = (
                    "give the recipe and --set it was made with, or "
                    if record["design"] != self.design
                    else ""
                )
                raise ConfigError(
                    f"{self.record_path(name, seed)} was made with {other} than this command has",
                    f"{as_it_was}add {_restart(name, seed)} to make it again",
                )

    def require_alike(
        self, arms: Sequence[Arm], seeds: Sequence[int], gone: Collection[tuple[str, int]]
    ) -> None:
        """Raises ConfigError when running these arms of these seeds would make records that cannot be pooled with those
        that stay. ``gone``: arms and seeds whose records are to be removed first; they may be damaged."""
        asked = [(arm.name, seed) for arm in arms for seed in seeds]
        made = [key for key in asked if key in gone or self.record(*key) is None]
        stay = self.records(gone) if made else {}
        names = {arm for arm, _ in made}
        strange = [
            (arm, seed)
            for (arm, seed), record in stay.items()
            if record["design"] != self.design or (arm in names and self.other(arm, record))
        ]
        if strange:
            raise self.mixed(strange)

    def records(self, without: Collection[tuple[str, int]] = ()) -> dict[tuple[str, int], dict[str, Any]]:
        """All records there are, but some. Raises CorruptArtifact."""
        keys = [(arm.name, seed) for arm in self.arms for seed in self.seeds]
        return {key: r for key in keys if key not in without and (r := self.record(*key)) is not None}

    def mixed(self, strange: Sequence[tuple[str, int]]) -> ConfigError:
        """The error of records that cannot be pooled with what this command makes: which, and how to make them again,
        all at once, since one alone would have to be pooled with the others."""
        seeds = {
            seed: [arm for arm, k in strange if k == seed] for _, seed in sorted(strange, key=lambda s: s[1])
        }
        told = "; ".join(f"seed {seed}: {', '.join(names)}" for seed, names in seeds.items())
        names = {arm for arm, _ in strange}
        roots = [a for a in self.arms if a.name in names and not names & set(a.after)]
        options = [f"--seed {seed}" for seed in seeds]
        if any(arm.after for arm in roots):  # else all that the seed has goes
            options += [f"--only-arm {arm.name}" for arm in roots]
        return ConfigError(
            f"records of different configurations or conditions are not pooled, and in {self.results / self.name} "
            f"these are not as this command makes them: {told}",
            f"make those again first with --restart {' '.join(options)}, or give another folder with --results",
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
            "conditions": _plain(self.conditions.get(arm.name, {})),
            "stages": {
                s.name: {"seconds": s.seconds, "figures": s.figures, **speed(s.name, s.folder)}
                for s in stages
            },
            "evaluations": self._keep_evaluations(stages, seed) if arm.name in self.evaluated else [],
            "curves": keep_curves([s.folder for s in stages], self.curves_path(arm.name, seed)),
            "machine": machine(),
            "commit": commit(),
            "command": command_line(),
        }
        write_json(self.record_path(arm.name, seed), body)

    def restart(self, arms: Collection[str], seed: int) -> None:
        """Removes what was made of these arms and of those that build on them, after saying what: their records,
        what lies beside these, and their stages in the run folder."""
        gone = self.with_dependents(arms)
        plan = plan_recipe(self.used, [f"seed={seed}", *self.overrides])
        stages = [name for arm in gone for name in self.stages_of(arm, plan)]
        folder = RunFolder(self.run_folder(plan, seed))
        names = ", ".join(arm.name for arm in gone)
        print(
            f"seed {seed}: removing the records of {names} and, in {folder.path}, {', '.join(stages)}",
            file=sys.stderr,
        )
        evaluations = {arm.name: self._kept_evaluations(arm.name, seed) for arm in gone}
        for arm in gone:
            self.record_path(arm.name, seed).unlink(missing_ok=True)
            if self.curves_path(arm.name, seed).exists():
                shutil.rmtree(self.curves_path(arm.name, seed))
            for name in evaluations.get(arm.name, []):
                (self.results / self.name / "evaluations" / name).unlink(missing_ok=True)
        if folder.exists:
            with folder.lock():
                folder.clear(stages)

    def with_dependents(self, names: Collection[str]) -> list[Arm]:
        """The arms of these names and those that build on them."""
        found: list[Arm] = []
        for arm in self.arms:
            if arm.name in names or any(earlier.name in arm.after for earlier in found):
                found.append(arm)
        return found

    def _kept_evaluations(self, arm: str, seed: int) -> list[str]:
        """Files of an arm that is to be removed. Those of a record that cannot be read stay until the arm writes them
        again: which are its own and which another arm's is not known."""
        try:
            return (self.record(arm, seed) or {}).get("evaluations", [])
        except CorruptArtifact:
            return []

    def execute(self, arm: Arm, seed: int) -> list[StageRun]:
        """Runs the arm's stages, and whatever before them is not finished, in runs/<recipe's name>-seed<k>."""
        plan = self.plan(seed)
        wanted = named_stages(arm, plan)
        if not wanted:
            raise ConfigError(
                f"recipe {self.used!r} has no stage for arm {arm.name!r}",
                f"name one of its stages {' or '.join(arm.stages)}",
            )
        folder = self.run_folder(plan, seed)
        self.require_artifacts(arm, plan, seed)
        try:
            outcome = run_plan(part_of(plan, wanted), folder, make_progress())
        except (ConfigError, CorruptArtifact) as error:
            raise self._mended(error, plan, folder, seed) from error
        return [StageRun(s.name, s.path, s.seconds, s.figures) for s in outcome.stages if s.name in wanted]

    def require_artifacts(self, arm: Arm, plan: Plan, seed: int) -> None:
        """Raises ConfigError when a recorded arm's stages are no longer there: made again they would be other models
        than those the record speaks of."""
        for earlier in (a for a in self.arms if a.name in arm.after):
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
        owner = next((a.name for a in self.arms if stage and stage[1] in self.stages_of(a, plan)), None)
        again = f"add {_restart(owner, seed)} to make it again, or " if owner else ""
        return type(error)(f"{folder}: {error.cause}", f"{again}give another folder with --runs")

    def _keep_evaluations(self, stages: Sequence[StageRun], seed: int) -> list[str]:
        """Copies EvalResults beside the record, so that figures need no run folder. Returns their names."""
        target = self.results / self.name / "evaluations"
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
        records of different configurations, or of one arm under different conditions, would be mixed."""
        records = self.records()
        designs = {r["design"] for r in records.values()}
        conditions = {(arm, json.dumps(r["conditions"], sort_keys=True)) for (arm, _), r in records.items()}
        if len(designs) > 1 or len(conditions) > len({arm for arm, _ in records}):
            raise self.mixed([key for key, r in records.items() if self.other(key[0], r)])
        return self.figures(records)

    def stages_of(self, arm: Arm, plan: Plan) -> list[str]:
        """The stages an arm runs when the arms before it are done: those it names and what these need."""
        before = [name for a in self.arms if a.name in arm.after for name in named_stages(a, plan)]
        earlier = {s.name for s in part_of(plan, before).stages}
        return [s.name for s in part_of(plan, named_stages(arm, plan)).stages if s.name not in earlier]


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


def _plain(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from a record."""
    return json.loads(json.dumps(conditions))


def _restart(arm: str, seed: int) -> str:
    return f"--restart --seed {seed} --only-arm {arm}"


def _fits(stage: str, pattern: str) -> bool:
    return stage.startswith(pattern[:-1]) if pattern.endswith("*") else stage == pattern
