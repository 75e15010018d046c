"""The whole path once: generated tasks, real sandboxes, the agent's own loop, grading in a fresh sandbox."""

from __future__ import annotations

import asyncio

import pytest

from cadenza.core.types import Policy
from cadenza.evaluation.evaluate import evaluate_policy
from cadenza.evaluation.report_inputs import trajectory_of
from cadenza.evaluation.statistics import pass_at_k
from cadenza.evaluation.suite import EvalLimits
from cadenza.harness import Agent, Limits, demo_tools
from cadenza.rollouts.expert import ExpertConfig, ScriptedExpert
from cadenza.rollouts.trial import prompt_of
from cadenza.sandbox import LocalBackend
from cadenza.tasks.bugs import DEMO_FAMILIES
from cadenza.tasks.generate import GeneratorConfig, SplitConfig, generate_split
from cadenza.tokens import CompactRenderer, Final, Sampled, Tokenizer

PERFECT = ExpertConfig(mistake=0.0)


class GivesUp:
    """A policy that closes at once without an edit."""

    def __init__(self, renderer: CompactRenderer) -> None:
        self._ids = renderer.render_action(Final("nothing to do"))

    async def sample(self, new_ids, sampling) -> Sampled:
        return Sampled(self._ids, [0.0] * len(self._ids), [0] * len(self._ids), "stop")

    def renew(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.needs_namespaces
def test_the_expert_solves_real_tasks_and_a_policy_that_gives_up_solves_none(tmp_path):
    split = SplitConfig(count=2, families=DEMO_FAMILIES)
    tasks = generate_split(GeneratorConfig(splits={"demo": split}), "demo", tmp_path / "demo")
    renderer = CompactRenderer(Tokenizer.train([prompt_of(t) for t in tasks] * 3, vocab_size=300))
    agent = Agent(renderer, demo_tools(), Limits(max_tokens_per_turn=512, max_context_tokens=4096))
    seen = []

    async def both():
        async with LocalBackend() as backend:
            common = {"suite": "demo", "samples": 1, "temperature": 0.0, "seed": 0}
            expert = await evaluate_policy(
                lambda task, sample, seed: ScriptedExpert.for_task(task, renderer, seed, PERFECT),
                tasks, backend, agent, policy=Policy("expert", 0, None, ""), limits=EvalLimits(concurrency=3),
                on_rollout=lambda *entry: seen.append(entry), **common,
            )  # fmt: skip
            lazy = await evaluate_policy(
                lambda task, sample, seed: GivesUp(renderer),
                tasks, backend, agent, policy=Policy("lazy", 0, None, ""), **common,
            )  # fmt: skip
            return expert, lazy

    expert, lazy = asyncio.run(both())
    assert pass_at_k(expert.outcomes()).values_N.tolist() == [1.0, 1.0], expert.records
    assert pass_at_k(lazy.outcomes()).values_N.tolist() == [0.0, 0.0]
    assert expert.suite_digest == lazy.suite_digest and expert.harness_digest == lazy.harness_digest
    assert all(r.tokens > 0 and r.turns > 1 for r in expert.records)
    shown = trajectory_of(seen[0][0], prompt_of(seen[0][0]), "expert", seen[0][1], seen[0][2])
    assert shown.solved and {"call", "output"} <= {turn.kind for turn in shown.turns} and shown.patch
