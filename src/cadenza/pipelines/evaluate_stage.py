"""Stage ``evaluate``: policies on held-out tasks, paired, each at its own best validation temperature."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from cadenza.core.config import StrictConfig, unknown_key
from cadenza.core.errors import CorruptArtifact
from cadenza.core.extras import TRAIN
from cadenza.core.files import read_json, write_json
from cadenza.core.types import Policy, Rollout, Task
from cadenza.evaluation.evaluate import choose_temperature, evaluate, harness_digest
from cadenza.evaluation.report_inputs import append_lines, trajectory_of
from cadenza.evaluation.result import EvalResult
from cadenza.evaluation.suite import EvalLimits
from cadenza.harness import Agent, demo_tools
from cadenza.orchestration.engine_metrics import metrics_of
from cadenza.orchestration.placement import Placement
from cadenza.orchestration.pool import RolloutPool
from cadenza.pipelines.services import (
    ServicesConfig,
    placement_of,
    spawn_engine,
    spawn_environment,
    tell_other_limits,
)
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.rollouts.trial import prompt_of
from cadenza.tasks.directory import load_tasks
from cadenza.tokens import CompactRenderer, Tokenizer


class SuiteTable(StrictConfig):
    """One list of tasks. ``split``: of the tasks. ``tasks``: how many of it, the first ones; 0 for all. ``samples``:
    attempts at each, at the chosen temperature. ``greedy``: each once more at temperature 0."""

    split: str = "heldout"
    tasks: int = 0
    samples: int = 8
    greedy: bool = True


class PolicyTable(StrictConfig):
    """What is asked of one policy only, to spend less on it. It meets the same tasks as the others, so that it can be
    paired with them. ``temperatures``: instead of the grid; ``samples``: at most so many of each suite; ``splits``: the
    suites it is evaluated on; ``greedy``: false leaves the greedy results out."""

    temperatures: tuple[float, ...] | None = None
    samples: int | None = Field(default=None, ge=1)
    splits: tuple[str, ...] | None = None
    greedy: bool = True


class EvaluateConfig(StrictConfig):
    """``suites``: what is measured. ``temperatures``: tried on validation tasks, never on held-out ones; with one
    nothing is tried. ``validation_split``: of the validation tasks; ``validation_tasks``: how many of it;
    ``validation_samples``: attempts at each at each temperature. ``policies``: by role, what is different for that
    policy. ``trajectories``: readable rollouts kept of each policy and suite. ``limits``: of the evaluation itself.
    ``services``: engine and environments."""

    suites: tuple[SuiteTable, ...] = (SuiteTable(),)
    temperatures: tuple[float, ...] = Field(default=(0.5, 0.8, 1.0), min_length=1)
    policies: dict[str, PolicyTable] = {}
    validation_split: str = "val"
    validation_tasks: int = 64
    validation_samples: int = 4
    trajectories: int = Field(default=16, ge=0)
    limits: EvalLimits = EvalLimits()
    services: ServicesConfig = ServicesConfig()

    @model_validator(mode="after")
    def _policies_fit(self) -> EvaluateConfig:
        known = {suite.split for suite in self.suites}
        for name, table in self.policies.items():
            if strange := set(table.splits or ()) - known:
                raise ValueError(f"policies.{name}.splits names {min(strange)!r}, which no suite has")
            if table.temperatures == ():
                raise ValueError(f"policies.{name}.temperatures is empty")
        return self


class Evaluate(Stage[EvaluateConfig]):
    """Artifact: ``evaluations/*.json``, ``temperature-POLICY.json`` (the table a temperature was chosen from),
    ``trajectories.jsonl``. Every role but ``tasks`` is a policy of that name."""

    Config = EvaluateConfig
    version = 2
    packages = TRAIN
    inputs = ("tasks",)
    open_inputs = True
    resumable = True

    def run(self, context: StageContext) -> Figures:
        figures: Figures = {}
        policies = [name for name in context.artifacts if name != "tasks"]
        for name in self.config.policies:
            if name not in policies:
                raise unknown_key(f"{context.name}.policies.{name}", name, policies)
        with placement_of(self.config.services) as placement:
            for name in policies:
                figures |= asyncio.run(self._policy(context, placement, name))
        return figures

    async def _policy(self, context: StageContext, placement: Placement, name: str) -> Figures:
        """All suites of one policy; results that an interrupted attempt left are kept."""
        config, folder = self.config, context.out / "evaluations"
        folder.mkdir(exist_ok=True)
        model = context.input(name)
        tell_other_limits(context, model, config.services.environment.agent)
        runner = _Runner(self.config, context, placement, name, model)
        figures: Figures = {}
        try:
            temperature = await runner.temperature()
            figures[f"{name}_temperature"] = temperature
            for suite in _suites_of(config, name):
                found = load_tasks(context.input("tasks") / suite.split)
                tasks = found[: suite.tasks] if suite.tasks else found
                plans = [(f"{suite.split}", suite.samples, temperature)]
                if suite.greedy:
                    plans.append((f"{suite.split}-greedy", 1, 0.0))
                for label, samples, at in plans:
                    path = folder / f"{name}-{label}.json"
                    if path.is_file():
                        result = EvalResult.load(path)
                    else:
                        result = await runner.evaluate(tasks, label, samples, at, suite.split)
                        result.save(path)
                    solved = [r.solved for r in result.records if r.solved is not None]
                    figures[f"{name}_{label}_pass1"] = sum(solved) / max(1, len(solved))
            figures |= {f"{name}_{key}": share for key, share in (await runner.metrics()).items()}
        finally:
            await runner.aclose()
        return figures


def _suites_of(config: EvaluateConfig, name: str) -> list[SuiteTable]:
    """The suites of one policy, cut to what its table asks."""
    table = config.policies.get(name, PolicyTable())
    return [
        suite.model_copy(
            update={
                "samples": min(suite.samples, table.samples or suite.samples),
                "greedy": suite.greedy and table.greedy,
            }
        )
        for suite in config.suites
        if table.splits is None or suite.split in table.splits
    ]


class _Runner:
    """One policy's engine and environments; started when the first result is not there yet."""

    def __init__(
        self, config: EvaluateConfig, context: StageContext, placement: Placement, name: str, model: Path
    ) -> None:
        self.config, self.context, self.placement = config, context, placement
        self.name, self.model = name, model
        self.agent = Agent(
            CompactRenderer(Tokenizer.load(model)), demo_tools(), config.services.environment.agent
        )
        self.pool: RolloutPool | None = None
        self.services: list = []
        self.kept = Counter[str]()

    async def _start(self) -> RolloutPool:
        if self.pool is None:
            engine = spawn_engine(self.placement, self.config.services, self.model)
            environment = spawn_environment(self.placement, self.config.services, engine, self.model)
            self.services = [environment, engine]
            self.pool = await RolloutPool(environment).__aenter__()
        return self.pool

    async def metrics(self) -> dict[str, float]:
        """Of the engine, over the trials of this attempt; nothing when none were left to do."""
        return await metrics_of(self.services[1]) if self.services else {}

    async def aclose(self) -> None:
        if self.pool is not None:
            await self.pool.__aexit__()
        for service in self.services:
            self.placement.kill(service)

    async def temperature(self) -> float:
        """The best of the grid on validation tasks; remembered with its table beside the results."""
        config = self.config
        table = config.policies.get(self.name, PolicyTable())
        temperatures = table.temperatures or config.temperatures
        if len(temperatures) == 1:
            return temperatures[0]
        path = self.context.out / f"temperature-{self.name}.json"
        if (known := self._known_temperature(path)) is not None:
            return known
        tasks = load_tasks(self.context.input("tasks") / config.validation_split)
        tasks = tasks[: config.validation_tasks]

        async def run(chosen: Sequence[Task], temperature: float) -> EvalResult:
            label = f"val t={temperature}"
            samples, split = config.validation_samples, config.validation_split
            return await self.evaluate(chosen, label, samples, temperature, split)

        choice = await choose_temperature(run, tasks, temperatures)
        self.context.telemetry.log("temperature", policy=self.name, table=choice.pass_at_1)
        tried = [{"temperature": t, "pass_at_1": rate} for t, rate in choice.pass_at_1.items()]
        write_json(
            path,
            {
                "policy": self.name,
                "temperature": choice.temperature,
                "split": config.validation_split,
                "tasks": len(tasks),
                "samples": config.validation_samples,
                "tried": tried,
            },
        )
        return choice.temperature

    def _known_temperature(self, path: Path) -> float | None:
        """What an interrupted attempt chose; None when it did not come so far, or left a file that is not whole."""
        if not path.is_file():
            return None
        try:
            return float(read_json(path)["temperature"])
        except (CorruptArtifact, KeyError, TypeError, ValueError) as error:
            self.context.logger.warning("%s is not whole (%s): the temperature is chosen again", path, error)
            return None

    async def evaluate(
        self, tasks: Sequence[Task], label: str, samples: int, temperature: float, suite: str
    ) -> EvalResult:
        """``label`` is for the progress bar; sampled and greedy results of one ``suite`` belong together.
        Those that carry their suite's own name, the sampled ones, are also kept readable."""
        pool = await self._start()
        with self.context.progress.bar(f"{self.name} on {label}", len(tasks) * samples) as bar:

            async def trial(task: Task, sample: int, seed: int) -> Rollout:
                return await pool.trial(task, sample, seed, temperature)

            def on_rollout(task: Task, sample: int, rollout: Rollout) -> None:
                bar.advance()
                if sample == 0 and label == suite and self.kept[suite] < self.config.trajectories:
                    self.kept[suite] += 1
                    readable = trajectory_of(task, prompt_of(task), self.name, sample, rollout)
                    append_lines(self.context.out / "trajectories.jsonl", [readable])

            return await evaluate(
                trial, tasks, policy=Policy(self.name, 0, None, ""), suite=suite,
                harness_digest=harness_digest(self.agent), samples=samples, temperature=temperature,
                seed=self.context.seed, limits=self.config.limits, on_rollout=on_rollout,
            )  # fmt: skip
