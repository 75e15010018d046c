"""Who answers whom, what is kept of it, and what the trainer is given."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from cadenza.core.errors import ConfigError
from cadenza.core.progress import Progress
from cadenza.core.rundb import RunDatabase
from cadenza.core.types import Policy, Rollout, RolloutFailure, Task, Verdict
from cadenza.pipelines.realtime_stage import Realtime, RealtimeConfig, _Round
from cadenza.pipelines.stages import StageContext
from cadenza.realtime import CanaryConfig, FeedbackLog, FeedbackRewards, judge
from cadenza.realtime import round as module
from cadenza.realtime.rewards import baselines
from cadenza.realtime.round import Production, TrafficConfig, advantages_of
from cadenza.realtime.users import user_of

TASKS = [Task(f"task{i}", Path("."), "users", 0, "s", "2026-01-01") for i in range(600)]


class Pool:
    """A policy that solves a share of the tasks. The same trial twice gives the same rollout."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.asked: list[str] = []

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *_: Any) -> None: ...

    async def trial(self, task: Task, sample: int, seed: int, temperature: float) -> Rollout:
        await asyncio.sleep(0)
        self.asked.append(task.id)
        solved = float((seed % 1000) / 1000 < self.share)
        return Rollout(
            f"{task.id}/{sample}",
            task.id,
            task.id,
            [],
            [],
            "diff",
            Verdict(solved),
            {},
            solved,
            "finished",
            {},
            seed,
        )


class Engine:
    """Tells the digest of the weights that it serves."""

    def __init__(self, model: Path) -> None:
        self.model = model

    async def ask(self, method: str, *, deadline_s: float) -> str:
        assert method == "digest" and deadline_s > 0
        return f"digest of {self.model}"


class Placement:
    def __init__(self) -> None:
        self.killed: list[Any] = []

    def kill(self, service: Any) -> None:
        self.killed.append(service)


@pytest.fixture
def production(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RolloutPool", lambda environment: environment)
    placement: Any = Placement()

    def spawn(model: Path):
        return Engine(model), Pool(float(model.name))

    return Production(placement, spawn, FeedbackLog(tmp_path / "feedback.jsonl"), TrafficConfig(), 5)  # pyright: ignore[reportArgumentType]


def up(production: Production, name: str, version: int, share: str):
    return production.bring_up(Policy(name, version, None, ""), Path(share))


def test_an_answer_is_lost_or_learned_from_with_the_wrong_sign(production):
    async def go():
        server = await up(production, "sft", 0, "0.5")
        answers = await production.serve(server, TASKS[:200])
        await production.shut(server)
        return answers, server

    answers, server = asyncio.run(go())
    assert [a.rollout.task_id for a in answers] == [t.id for t in TASKS[:200]]
    assert production.placement.killed == [*server.services]
    judged = judge(production.log.read(), FeedbackRewards())
    arms = {a.trajectory: a.policy.arm for a in answers}
    rollouts, advantages = advantages_of(answers, judged.rewards, baselines(judged.rewards, arms))
    assert len(rollouts) == len(judged.rewards) > 150
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    by_outcome = {True: [], False: []}
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        by_outcome[rollout.verdict.score == 1.0].append(advantage)
    assert (
        sum(by_outcome[True]) / len(by_outcome[True])
        > 0.3
        > -0.3
        > sum(by_outcome[False]) / len(by_outcome[False])
    )


@pytest.mark.parametrize(("share", "state"), [("0.0", "rolled_back"), ("0.95", "passed")])
def test_the_canary_shows_the_candidate_to_all_or_goes_on_after_it_has_decided(production, share, state):
    async def go():
        serving = await up(production, "sft", 0, "0.7")
        new = await up(production, "rl", 1, share)
        canary = await production.canary(serving, new, TASKS, CanaryConfig(), "salt")
        return canary, serving.pool, new.pool

    canary, old, new = asyncio.run(go())
    assert canary.state == state and canary.reason
    assert len(old.asked) + len(new.asked) < 300  # pyright: ignore[reportAttributeAccessIssue]
    users = [{user_of(task, TrafficConfig().users) for task in pool.asked} for pool in (old, new)]  # pyright: ignore[reportAttributeAccessIssue]
    assert users[0] and users[1] and not users[0] & users[1]
    events = production.log.read()
    assert {e.policy.propensity for e in events} == {0.5}
    assert {e.policy.version for e in events if e.policy.arm == "canary"} == {1}


def test_an_answer_that_the_infrastructure_broke_is_held_against_the_policy(production):
    lost = Verdict(None, RolloutFailure("sandbox_gone", "x", retry=True, counts=False))

    class Frail(Pool):
        async def trial(self, task, sample, seed, temperature):
            rollout = await super().trial(task, sample, seed, temperature)
            broken = self.asked.count(task.id) < (3 if task.id != "task0" else 9)
            return dataclasses.replace(rollout, verdict=lost) if broken else rollout

    async def go():
        server = dataclasses.replace(await up(production, "sft", 0, "1.0"), pool=Frail(1.0))
        return await production.serve(server, TASKS[:20])

    answers = asyncio.run(go())
    assert [bool(a.events) for a in answers] == [False] + [True] * 19
    assert {a.rollout.verdict.score for a in answers[1:]} == {1.0}


def test_a_line_of_the_feedback_does_not_say_which_weights_answered(production):
    async def go():
        serving, new = await up(production, "sft", 0, "0.7"), await up(production, "rl", 1, "0.6")
        await production.canary(serving, new, TASKS[:60], CanaryConfig(), "salt")
        return serving, new

    serving, new = asyncio.run(go())
    assert (serving.policy.digest, new.policy.digest) == ("digest of 0.7", "digest of 0.6")
    found = {(e.policy.arm, e.policy.digest) for e in production.log.read()}
    assert found == {("serving", "digest of 0.7"), ("canary", "digest of 0.6")}


@pytest.mark.parametrize(("tasks", "missing"), [(8, 5), (12, 1), (13, 0), (40, 0)])
def test_the_canary_is_asked_fewer_tasks_than_it_should_without_a_word(tmp_path, caplog, tasks, missing):
    said: list[str] = []
    progress = Progress()
    progress.line = said.append  # type: ignore[method-assign]
    nothing: Any = None
    context = StageContext(
        "realtime", tmp_path, tmp_path, False, "r", "r/realtime", 0, nothing, nothing, progress,
        logging.getLogger("cadenza.realtime"), {"model": tmp_path},
    )  # fmt: skip
    made = _Round(RealtimeConfig(answers=3, canary_tasks=10), context, TASKS[:tasks])
    assert len(made.later) == 10 - missing and made.figures.get("canary_tasks_missing", 0) == missing
    told = (
        f"canary: {10 - missing} tasks instead of 10: split 'train' has {tasks} that were not drawn before, "
        "and 3 of them are learned from"
    )
    assert said == ([told] if missing else []) == [record.message for record in caplog.records]


def test_too_few_users_deploy_a_candidate(production):
    async def go():
        serving = await up(production, "sft", 0, "0.7")
        new = await up(production, "rl", 1, "0.7")
        return await production.canary(serving, new, TASKS[:30], CanaryConfig(), "salt")

    canary = asyncio.run(go())
    assert canary.state == "watching"
    few = f"{canary.answers['canary']}, and {canary.answers['serving']} of the policy that is served"
    assert canary.told() == f"too few answers to decide: {few}, where 60 of each are asked for"


@pytest.mark.needs_train
def test_a_round_that_is_begun_again_and_fails_leaves_nobody_served(tmp_path, small_model):
    """The gate had pointed to its own policy, and is not run again."""
    import torch

    from cadenza.model.digest import served_digest

    nothing: Any = None
    (tmp_path / "tasks" / "train").mkdir(parents=True)
    with RunDatabase.open(tmp_path / "cadenza.db") as database:
        for version in range(2):
            database.add_policy("r/realtime", Policy("serving", version, None, "d"))
        database.point("r/serving", "r/realtime", 1)
        database.forget_stage("r", "realtime")
        context = StageContext(
            "realtime", tmp_path, tmp_path, False, "r", "r/realtime", 0, database, nothing, Progress(),
            logging.getLogger("cadenza.realtime"), {"model": small_model, "tasks": tmp_path / "tasks"},
        )  # fmt: skip
        config = RealtimeConfig.model_validate({"services": {"engine": {"dtype": "float32"}}})
        with pytest.raises(ConfigError, match="no RL stage 'rl' of this run has drawn a task"):
            Realtime(config).run(context)
        (alias,) = database.aliases("r")
    told = (alias.alias, alias.stage, alias.version, alias.digest)
    assert told == ("serving", "realtime", 0, served_digest(small_model, torch.float32))
