"""Stage ``realtime``: one round in which the served policy learns from its users, and two drills.

The drills show that the guards work, in every run: a damaged candidate must be refused by the gate, and one that got
past it must not pass the canary. If either lets it through, the stage fails. A canary that has met too few users to say
anything deploys nothing, but has not shown that it takes back either; the figures say which it was.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from cadenza.core.artifacts import copy_model
from cadenza.core.config import StrictConfig
from cadenza.core.errors import CadenzaError, ConfigError, MissingArtifact
from cadenza.core.extras import TRAIN
from cadenza.core.types import Policy, Task
from cadenza.evaluation.evaluate import harness_digest
from cadenza.evaluation.gate import Decision, GateConfig, decide
from cadenza.evaluation.report_inputs import DAMAGED, DRILL, DecisionRecord, append_lines
from cadenza.harness import Agent, demo_tools, save_limits
from cadenza.orchestration.engine_metrics import metrics_of
from cadenza.orchestration.placement import Remote
from cadenza.pipelines.services import (
    ServicesConfig,
    placement_of,
    spawn_engine,
    spawn_environment,
    tell_other_limits,
)
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.realtime.canary import Canary, CanaryConfig
from cadenza.realtime.feedback import FeedbackLog
from cadenza.realtime.rewards import FeedbackRewards, baselines, behaviour, judge
from cadenza.realtime.round import Answer, Production, Server, TrafficConfig, advantages_of
from cadenza.tasks.directory import load_tasks
from cadenza.tokens import CompactRenderer, Tokenizer
from cadenza.training.config import RLStepConfig

if TYPE_CHECKING:
    from cadenza.evaluation.result import EvalResult
    from cadenza.model.transformer import PolicyModel

CALL_S = 300.0


class RealtimeConfig(StrictConfig):
    """``split``: of the tasks that users ask for. ``after``: the RL stage whose prompts they leave out ("": none).
    ``answers``: tasks, the first ones, whose answers are learned from. ``canary_tasks``: tasks after those that a
    canary is asked at most. ``traffic``: how many users there are and what they do. ``rewards``: what that is worth.
    ``steps``: optimizer steps on the answers; ``step``: keys of one optimizer step. ``gate_split``: of the tasks that
    the gate measures on; ``gate_tasks``: how many of it; ``gate_samples``: attempts at each. ``gate``: what may be
    lost; ``canary``: how long users try it, and what they may lose. ``damage``: of the drills' weights: noise relative
    to each tensor's spread (0: no drills). ``trainer_threads``: cores of the trainer. ``services``: engine and
    environments."""

    split: str = "train"
    after: str = "rl"
    answers: int = Field(default=96, gt=0)
    canary_tasks: int = Field(default=240, gt=0)
    traffic: TrafficConfig = TrafficConfig()
    rewards: FeedbackRewards = FeedbackRewards()
    steps: int = Field(default=2, gt=0)
    step: RLStepConfig = RLStepConfig(lr=1e-4)
    gate_split: str = "val"
    gate_tasks: int = Field(default=64, gt=0)
    gate_samples: int = Field(default=2, gt=0)
    gate: GateConfig = GateConfig()
    canary: CanaryConfig = CanaryConfig()
    damage: float = Field(default=0.7, ge=0)
    trainer_threads: int = Field(default=2, gt=0)
    services: ServicesConfig = ServicesConfig()


class Realtime(Stage[RealtimeConfig]):
    """Artifact: the policy that is served afterwards (a model directory), ``feedback.jsonl``, ``decisions.jsonl``.
    Input ``model``: the policy that is served before; ``tasks``: the task set. Figure ``canary_tasks_missing``: how
    many of ``canary_tasks`` the split lacks, where it lacks some."""

    Config = RealtimeConfig
    version = 2
    packages = TRAIN
    inputs = ("model", "tasks")

    def run(self, context: StageContext) -> Figures:
        context.database.rewind(context.rl_run, -1)  # what an interrupted attempt recorded
        _serve_input(context, self.config.services.engine.dtype)
        after = self.config.after
        seen = (
            {entry.task_id for entry in context.database.ledger(f"{context.run_id}/{after}")}
            if after
            else set()
        )
        if after and not seen:
            raise ConfigError(
                f"no RL stage {after!r} of this run has drawn a task",
                f'name one in {context.name}.after, or set it to ""',
            )
        tasks = [t for t in load_tasks(context.input("tasks") / self.config.split) if t.id not in seen]
        if len(tasks) <= self.config.answers:
            raise MissingArtifact(
                f"split {self.config.split!r} has {len(tasks)} tasks left, and the canary would get none",
                f"give it more, or lower {context.name}.answers",
            )
        return asyncio.run(_Round(self.config, context, tasks).run())


class _Round:
    """One round, step by step. ``self.run_key`` names its policies in the run database: 0 is served before, 1 is the
    candidate, 2 the damaged one."""

    def __init__(self, config: RealtimeConfig, context: StageContext, tasks: list[Task]) -> None:
        self.config, self.context = config, context
        self.asked, self.later = tasks[: config.answers], tasks[config.answers :][: config.canary_tasks]
        self.model = context.input("model")
        tell_other_limits(context, self.model, config.services.environment.agent)
        self.run_key = context.rl_run
        self.served = 0
        self.figures: Figures = {}
        if missing := config.canary_tasks - len(self.later):
            self.figures["canary_tasks_missing"] = missing
            told = (
                f"canary: {len(self.later)} tasks instead of {config.canary_tasks}: split {config.split!r} has "
                f"{len(tasks)} that were not drawn before, and {len(self.asked)} of them are learned from"
            )
            context.progress.line(told)
            context.logger.warning("%s", told)

    async def run(self) -> Figures:
        config, context = self.config, self.context
        log = FeedbackLog(context.out / "feedback.jsonl")
        with (
            placement_of(config.services) as placement,
            context.progress.bar(f"{context.name}, answers to users") as bar,
        ):

            def spawn(model: Path) -> tuple[Remote, Remote]:
                engine = spawn_engine(placement, config.services, model)
                return engine, spawn_environment(placement, config.services, engine, self.model)

            self.placement = placement
            self.production = Production(
                placement, spawn, log, config.traffic, context.seed_for("traffic"), on_answer=bar.advance
            )
            serving = await self._bring_up("serving", 0, self.model)
            try:
                answers = await self.production.serve(serving, self.asked)
                candidate = await asyncio.to_thread(
                    self._learn, answers, log
                )  # the pool goes on in this loop
                winner = await self._deploy(serving, candidate)
                self.figures |= await metrics_of(serving.services[1])
            finally:
                await self.production.shut(serving)
        copy_model(winner, context.out)
        # Last of all: it never names a policy that is not kept.
        self._point("serving", self.served)
        for name in ("candidate", DAMAGED, "weights"):
            shutil.rmtree(context.out / name, ignore_errors=True)
        return self.figures

    def _learn(self, answers: list[Answer], log: FeedbackLog) -> Path:
        """Trains on what users did, into a folder of its own."""
        from cadenza.inference.engine import torch_dtype
        from cadenza.pipelines.lm_loop import use_bf16
        from cadenza.training.trainer import TrainerService
        from cadenza.weights import ChainAddress

        config, out, threads = self.config, self.context.out / "candidate", self.config.trainer_threads
        events = log.read()
        judged = judge(events, config.rewards)
        arms = {a.trajectory: a.policy.arm for a in answers}
        rollouts, advantages = advantages_of(answers, judged.rewards, baselines(judged.rewards, arms))
        self.figures |= {f"share_{name}": share for name, share in judged.shares().items()} | behaviour(
            events
        )
        if judged.rewards:
            self.figures["mean_reward"] = sum(judged.rewards.values()) / len(judged.rewards)
        trainer = self.placement.spawn(
            "trainer", TrainerService, str(self.model), config.step, threads, use_bf16(),
            ChainAddress(str(self.context.out / "weights")), threads=threads,
        )  # fmt: skip
        # Tells the trainer which weights have answered: it refuses answers of any others.
        dtype = str(torch_dtype(config.services.engine.dtype)).removeprefix("torch.")
        trainer.call("publish", dtype).result(timeout=CALL_S)
        database = self.context.database
        database.plan(self.run_key, 1, [(r.task_id, r.task_id) for r in rollouts])
        for step in range(config.steps):  # one pass over the answers, cut into steps
            part = slice(step, None, config.steps)
            call = trainer.call("step_single", rollouts[part], advantages[part])
            metrics, trained = call.result(timeout=CALL_S), [r.task_id for r in rollouts[part]]
            database.record_step(self.run_key, step + 1, 1, metrics, trained=trained)
        tokenizer = Tokenizer.load(self.model)
        out.mkdir()
        tokenizer.save(out)
        save_limits(config.services.environment.agent, out)
        ends = tokenizer.id("<|bos|>"), tokenizer.id("<|end|>")
        trainer.call("export", str(out), *ends).result(timeout=CALL_S)
        self.placement.kill(trainer)
        return out

    async def _deploy(self, serving: Server, candidate: Path) -> Path:
        """Gate, canary, drills; the folder of the policy that is served in the end."""
        tasks = load_tasks(self.context.input("tasks") / self.config.gate_split)[: self.config.gate_tasks]
        before = await self._measure(serving, tasks)
        winner = self.model
        async with self._up("candidate", 1, candidate) as new:
            decision = self._decide(await self._measure(new, tasks), before)
            if decision.promote and (await self._try(serving, new, "deployed")).state == "passed":
                winner, self.served = candidate, 1
        self.figures["deployed"] = self.served == 1
        if self.config.damage:
            await self._drill(serving, before, tasks)
        return winner

    async def _drill(self, serving: Server, before: EvalResult, tasks: list[Task]) -> None:
        """A damaged policy meets the gate, and then the canary as if it had passed. Raises when one lets it through."""
        from cadenza.model.hf import load_model
        from cadenza.pipelines.lm_loop import save_with_tokenizer

        folder = self.context.out / DAMAGED
        folder.mkdir()
        model = load_model(self.model)
        damage(model, self.config.damage, self.context.seed_for(DAMAGED))
        save_with_tokenizer(model, Tokenizer.load(self.model), folder)
        async with self._up(DAMAGED, 2, folder) as bad:
            refused = not self._decide(await self._measure(bad, tasks), before).promote
            canary = await self._try(serving, bad, DRILL)
        self.figures |= {"damaged_refused": refused, "damaged_rolled_back": canary.state == "rolled_back"}
        if not refused or canary.state == "passed":
            guard = "gate" if not refused else "canary"
            raise CadenzaError(
                f"the {guard} let a damaged policy through (canary: {canary.state} {canary.told()})",
                f"give it more to see: raise {self.context.name}.gate_tasks or the tasks of split "
                f"{self.config.split!r}, or tighten its margins",
            )

    @asynccontextmanager
    async def _up(self, name: str, version: int, model: Path) -> AsyncIterator[Server]:
        server = await self._bring_up(name, version, model)
        try:
            yield server
        finally:
            await self.production.shut(server)

    async def _bring_up(self, name: str, version: int, model: Path) -> Server:
        policy = Policy(name, version, 0 if version else None, "")
        server = await self.production.bring_up(policy, model)
        self.context.database.add_policy(self.run_key, server.policy)  # with the digest that it serves
        return server

    async def _measure(self, server: Server, tasks: list[Task]) -> EvalResult:
        agent = Agent(
            CompactRenderer(Tokenizer.load(self.model)), demo_tools(), self.config.services.environment.agent
        )
        return await self.production.measure(
            server, tasks, self.config.gate_split, self.config.gate_samples, harness_digest(agent)
        )

    def _decide(self, new: EvalResult, old: EvalResult) -> Decision:
        decision = decide([new], [old], self.config.gate)
        self._record("gate", decision.model_dump(mode="json"))
        verdict = "passes" if decision.promote else "is refused: " + "; ".join(decision.reasons())
        self.context.progress.line(f"gate: {decision.candidate} {verdict}")
        return decision

    async def _try(self, serving: Server, new: Server, what: str) -> Canary:
        """Some users meet the new policy; the alias says so while they do."""
        self._point("canary", new.policy.version)
        salt = f"{self.context.seed}/{what}/{new.policy.version}"
        canary = await self.production.canary(serving, new, self.later, self.config.canary, salt)
        if canary.state != "passed":
            self._point("canary", self.served)
        about = {"policy": new.policy.name, "state": canary.state, "reason": canary.told()}
        about |= {"answers": dict(canary.answers), "taken": dict(canary.taken)}
        self._record("canary", about)
        self.context.progress.line(f"canary: {new.policy.name} {canary.state}: {canary.told()}")
        return canary

    def _record(self, guard: str, data: dict[str, Any]) -> None:
        self.context.database.event(self.context.run_id, guard, data, wait=True)
        append_lines(self.context.out / "decisions.jsonl", [DecisionRecord.from_event(guard, data)])

    def _point(self, alias: str, version: int) -> None:
        self.context.database.point(f"{self.context.run_id}/{alias}", self.run_key, version)


def _serve_input(context: StageContext, dtype: str) -> None:
    """Says that users meet the policy that comes in, before anything can fail: the alias that the gate moved is gone
    when an earlier round had moved it on and was thrown away."""
    from cadenza.inference.engine import torch_dtype
    from cadenza.model.digest import served_digest

    policy = Policy("serving", 0, None, served_digest(context.input("model"), torch_dtype(dtype)))
    context.database.add_policy(context.rl_run, policy)
    context.database.point(f"{context.run_id}/serving", context.rl_run, policy.version)


def damage(model: PolicyModel, scale: float, seed: int) -> None:
    """Adds to every matrix noise of ``scale`` times its own standard deviation, as a torn upload would, but so that it
    can still be loaded."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std() * scale)
