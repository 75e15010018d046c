"""One round of learning from use: serve, listen, train, gate, canary, deploy or roll back.

The same services as in RL and evaluation do the work; this file says in which order and who decides. A policy is a
model directory with a name and a version; which one is served is said by the alias ``serving`` of the run database, and
``canary`` names the one that some users meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cadenza.core.config import StrictConfig
from cadenza.core.errors import DeadlineExceeded
from cadenza.core.types import Policy, Rollout, Task
from cadenza.evaluation.evaluate import evaluate, slot_seed
from cadenza.evaluation.report_inputs import ROUND
from cadenza.evaluation.result import EvalResult
from cadenza.evaluation.suite import EvalLimits
from cadenza.orchestration.placement import Placement, Remote
from cadenza.orchestration.pool import RolloutPool
from cadenza.realtime.canary import Canary, CanaryConfig
from cadenza.realtime.feedback import FeedbackEvent, FeedbackLog, ServedPolicy
from cadenza.realtime.users import UserConfig, react, trajectory_id, user_of

ATTEMPTS = 3  # at an answer that the infrastructure breaks
UP_S = 300.0  # until an engine has read its model and compiled its kernels
Spawn = Callable[[Path], tuple[Remote, Remote]]  # a model's folder -> (engine, environment) that serve it


class TrafficConfig(StrictConfig):
    """``temperature``: of what is served. ``users``: who they are and what they do. ``concurrency``: of answers."""

    temperature: float = 0.6
    users: UserConfig = UserConfig()
    concurrency: int = 32


@dataclass(frozen=True)
class Answer:
    """What one user got, who gave it, and what the user did: nothing where the infrastructure broke it."""

    rollout: Rollout
    policy: ServedPolicy
    events: list[FeedbackEvent]
    trajectory: str  # as the events call it


@dataclass(frozen=True)
class Server:
    """A policy that is up. Close it by ``shut``."""

    policy: Policy
    pool: RolloutPool
    services: tuple[Remote, Remote]


class Production:
    """Serves policies to users and keeps what they do. Use within one event loop.

    Args:
        spawn: brings a model up.
        on_answer: told after each answer, for a progress bar.
    """

    def __init__(
        self,
        placement: Placement,
        spawn: Spawn,
        log: FeedbackLog,
        config: TrafficConfig,
        seed: int,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self.placement, self.spawn, self.log = placement, spawn, log
        self.config, self.seed, self.on_answer = config, seed, on_answer

    async def bring_up(self, policy: Policy, model: Path) -> Server:
        """The policy as a server that answers. Its ``policy`` carries the digest of the weights that are served, as the
        engine tells it. Raises DeadlineExceeded, or what ended the engine."""
        engine, environment = self.spawn(model)
        try:
            digest = await engine.ask("digest", deadline_s=UP_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine of policy {policy.name!r} was not up within {UP_S:.0f} s",
                "run the same command again",
            ) from None
        pool = await RolloutPool(environment).__aenter__()
        return Server(replace(policy, digest=digest), pool, (environment, engine))

    async def shut(self, server: Server) -> None:
        await server.pool.__aexit__()
        for service in server.services:
            self.placement.kill(service)

    async def serve(self, server: Server, tasks: Sequence[Task]) -> list[Answer]:
        """Every task's user asks once; answers in the order of ``tasks``."""
        room = asyncio.Semaphore(self.config.concurrency)
        policy = _served(server.policy, "serving", 1.0)

        async def one(number: int, task: Task) -> Answer:
            async with room:
                return await self._answer(server, task, number, policy, ROUND)

        return list(await asyncio.gather(*(one(i, task) for i, task in enumerate(tasks))))

    async def canary(
        self, serving: Server, candidate: Server, tasks: Sequence[Task], config: CanaryConfig, salt: str
    ) -> Canary:
        """Users ask in groups of ``concurrency`` and meet the policy of their arm until the canary decides, or
        there are no more: then what was not shown to be worse is not deployed either, and ``state`` is watching.
        ``salt`` names the occasion."""
        canary = Canary(config, salt)
        step = self.config.concurrency
        for start in range(0, len(tasks), step):
            asking = enumerate(tasks[start : start + step], start)
            met = [self._meet(canary, serving, candidate, task, number, salt) for number, task in asking]
            for answer in await asyncio.gather(*met):
                canary.observe(answer.policy, answer.events)
            if canary.state != "watching":
                break
        return canary

    async def _meet(
        self, canary: Canary, serving: Server, candidate: Server, task: Task, number: int, occasion: str
    ) -> Answer:
        arm, chance = canary.arm_of(user_of(task.id, self.config.users))
        server = candidate if arm == "canary" else serving
        policy = _served(server.policy, arm, chance)
        return await self._answer(server, task, number, policy, occasion)

    async def _answer(
        self, server: Server, task: Task, number: int, policy: ServedPolicy, occasion: str
    ) -> Answer:
        seed = slot_seed(self.seed, f"{policy.arm}/{policy.version}/{task.id}", number)
        for _ in range(ATTEMPTS):
            rollout = await server.pool.trial(task, number, seed, self.config.temperature)
            events = react(rollout, policy, self.config.users, self.seed, occasion)
            if events:
                break
        self.log.append(events)
        self.on_answer()
        return Answer(rollout, policy, events, trajectory_id(rollout, policy, occasion))

    async def measure(
        self, server: Server, tasks: Sequence[Task], suite: str, samples: int, harness_digest: str
    ) -> EvalResult:
        """For the gate: the same trials without users."""

        async def trial(task: Task, sample: int, seed: int) -> Rollout:
            return await server.pool.trial(task, sample, seed, self.config.temperature)

        return await evaluate(
            trial, tasks, policy=server.policy, suite=suite, harness_digest=harness_digest, samples=samples,
            temperature=self.config.temperature, seed=self.seed, limits=EvalLimits(),
            on_rollout=lambda *_: self.on_answer(),
        )  # fmt: skip


def _served(policy: Policy, arm: str, chance: float) -> ServedPolicy:
    return ServedPolicy(
        model=policy.name, version=policy.version, digest=policy.digest, arm=arm, propensity=chance
    )


def advantages_of(
    answers: Sequence[Answer], rewards: dict[str, float], baselines: dict[str, float]
) -> tuple[list[Rollout], list[float]]:
    """What the trainer takes: answers with a reward, and by how much each was better than its arm's usual one."""
    rollouts, advantages = [], []
    for answer in answers:
        reward = rewards.get(answer.trajectory)
        if reward is not None:
            rollouts.append(answer.rollout)
            advantages.append(reward - baselines[answer.policy.arm])
    return rollouts, advantages
