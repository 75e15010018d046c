"""Stage ``demonstrations``: the scripted expert works in real sandboxes; what it solved is kept as rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.errors import CorruptArtifact
from cadenza.core.types import Rollout
from cadenza.harness import Agent, Limits, demo_tools, save_limits
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.rollouts import ExpertConfig, ScriptedExpert, Trial, run_trial, run_trials
from cadenza.rollouts.record import write_rollouts
from cadenza.sandbox.local import LocalBackend
from cadenza.tasks.directory import load_tasks
from cadenza.tokens import CompactRenderer, Sampling, Tokenizer


class DemonstrationsConfig(StrictConfig):
    """``split``: of the tasks shown. ``count``: tasks shown; 0 for all of it. ``concurrency``: runs at once. ``agent``:
    limits that the expert keeps to, and after it the model. ``expert``: what it does by chance."""

    split: str = "demo"
    count: int = Field(default=0, ge=0)
    concurrency: int = Field(default=6, gt=0)
    agent: Limits = Limits()
    expert: ExpertConfig = ExpertConfig()


class Demonstrations(Stage[DemonstrationsConfig]):
    """Artifact: ``demonstrations.cdzr``, only runs that finished and whose graded patch passes every test, and the
    limits they kept to."""

    Config = DemonstrationsConfig
    version = 2
    inputs = ("tasks", "tokenizer")

    def run(self, context: StageContext) -> Figures:
        config = self.config
        tasks = load_tasks(context.input("tasks") / config.split)
        tasks = tasks[: config.count] if config.count else tasks
        renderer = CompactRenderer(Tokenizer.load(context.input("tokenizer")))
        trials = [Trial(task, context.seed_for(task.id), task.id) for task in tasks]
        rollouts = asyncio.run(self._collect(context, renderer, trials))
        # One that a limit cut after its edit would teach to break off.
        solved = [r for r in rollouts if r.verdict.score == 1.0 and r.segments[-1].finish_reason == "finish"]
        if not solved:
            raise CorruptArtifact(
                "the expert solved no task", "this is a defect; report it with the recipe and the log"
            )
        write_rollouts(context.out / "demonstrations.cdzr", solved)
        save_limits(config.agent, context.out)
        return {
            "demonstrations": len(solved),
            "solved_share": len(solved) / len(rollouts),
            "mean_tokens": sum(len(s.ids_T) for r in solved for s in r.segments) / len(solved),
            "mean_contexts": sum(len(r.segments) for r in solved) / len(solved),
        }

    async def _collect(
        self, context: StageContext, renderer: CompactRenderer, trials: Sequence[Trial]
    ) -> list[Rollout]:
        agent = Agent(renderer, demo_tools(), self.config.agent)
        async with LocalBackend() as backend:

            async def one(trial: Trial) -> Rollout:
                expert = ScriptedExpert.for_task(trial.task, renderer, trial.seed, self.config.expert)
                return await run_trial(
                    trial.task, expert, backend, agent, Sampling(), trial.seed, trial.group_id
                )

            with context.progress.bar("demonstrations", len(trials)) as bar:
                return await run_trials(
                    trials, one, concurrency=self.config.concurrency, on_done=lambda *_: bar.advance()
                )
