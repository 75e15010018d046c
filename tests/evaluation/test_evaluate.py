"""An evaluation must not lose, repeat, reorder or invent a rollout, nor tune on held-out tasks."""

from __future__ import annotations

import asyncio
import random

import pytest
from rollouts_made import POLICY, rollout, task

from cadenza.core.errors import ConfigError, DeadlineExceeded, ForeignSample, RolloutFailure
from cadenza.core.types import Policy
from cadenza.evaluation.evaluate import choose_temperature, evaluate, slot_seed
from cadenza.evaluation.statistics import TooManyInvalid, pass_at_k
from cadenza.evaluation.suite import EvalLimits

FIVE = EvalLimits(concurrency=5)
TASKS = [task(f"t{i}") for i in range(6)]


def run(trial, tasks=TASKS, samples=4, limits=FIVE, policy=POLICY, **more):
    return asyncio.run(
        evaluate(
            trial,
            tasks,
            policy=policy,
            suite="heldout",
            harness_digest="h",
            samples=samples,
            temperature=0.7,
            seed=0,
            limits=limits,
            **more,
        )
    )


def test_every_slot_is_recorded_once_in_order_whatever_order_they_finish_in():
    async def trial(of, sample, seed):
        for _ in range(random.randrange(6)):
            await asyncio.sleep(0)
        return rollout(of, seed, float(int(of.id[1:]) % 2), tokens=10 + sample)

    result = run(trial)
    assert [(r.task_id, r.sample) for r in result.records] == [(t.id, s) for t in TASKS for s in range(4)]
    assert pass_at_k(result.outcomes()).values_N.tolist() == [0, 1, 0, 1, 0, 1]
    assert result.outcomes().tokens_NS[0].tolist() == [10, 11, 12, 13]
    assert result.policy_version == 3 and result.machine["cores"] >= 1


@pytest.mark.parametrize("echoed", [["0:d1", "0:d2"], ["0:d2", "0:d2"], ["0:d1,1:d2", "0:d1"]])
def test_an_evaluation_of_other_weights_than_the_policys_is_recorded_as_its_own(echoed):
    async def trial(of, sample, seed):
        return rollout(of, seed, 1.0, weights=echoed[sample])

    with pytest.raises(ForeignSample, match="d2"):
        run(trial, samples=2)


def test_a_result_does_not_say_which_weights_the_engine_served():
    async def trial(of, sample, seed):
        return rollout(of, seed, 1.0, weights="0:d5")

    unknown = Policy("sft", 0, None, "")
    assert run(trial, policy=unknown).policy_digest == "d5"


def test_no_more_trials_at_once_than_the_limit():
    at_once, most = 0, 0

    async def trial(of, sample, seed):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return rollout(of, seed, 1.0)

    run(trial)
    assert most == 5


def test_an_infrastructure_failure_is_tried_again_with_the_same_seed():
    seen: dict[tuple[str, int], list[int]] = {}

    async def trial(of, sample, seed):
        seeds = seen.setdefault((of.id, sample), [])
        seeds.append(seed)
        if of.id == "t2" and len(seeds) == 1:
            return rollout(of, seed, None, failure=RolloutFailure("sandbox_gone", "killed", True, False))
        return rollout(of, seed, 1.0)

    result = run(trial)
    assert {r.attempts for r in result.records if r.task_id == "t2"} == {2}
    assert all(len(set(s)) == 1 for s in seen.values())
    assert result.outcomes().invalid_share == 0 and result.failures() == {}


def test_a_failure_that_stays_is_no_verdict_and_too_many_refuse_the_result():
    async def trial(of, sample, seed):
        if of.id == "t0":
            return rollout(of, seed, None, failure=RolloutFailure("grader_crashed", "x", True, False))
        return rollout(of, seed, 1.0)

    with pytest.raises(TooManyInvalid, match="'sft' on 'heldout'"):
        run(trial)
    result = run(trial, limits=EvalLimits(valid_floor=0.5))
    assert result.records[0].solved is None and result.records[0].attempts == 3
    assert result.failures() == {"grader_crashed": 4}


def test_the_models_own_failure_counts_as_not_solved():
    async def trial(of, sample, seed):
        return rollout(of, seed, None, failure=RolloutFailure("patch_refused", "x", False, True))

    result = run(trial)
    assert {r.solved for r in result.records} == {False}
    assert result.outcomes().invalid_share == 0 and result.failures() == {"patch_refused": 24}


def test_an_error_in_a_trial_stops_the_evaluation_and_keeps_its_type():
    async def trial(of, sample, seed):
        if of.id == "t3":
            raise ConfigError("bad", "mend")
        await asyncio.Event().wait()

    with pytest.raises(ConfigError):
        run(trial, limits=EvalLimits(concurrency=64))


def test_an_evaluation_that_hangs_ends_at_its_deadline_and_names_it():
    async def trial(of, sample, seed):
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="started 5 of 24"):
        run(trial, limits=EvalLimits(deadline_s=0.02, concurrency=5))


def test_slot_seeds_do_not_depend_on_policy_or_order_and_differ():
    seeds = {slot_seed(s, t.id, k) for s in range(3) for t in TASKS for k in range(4)}
    assert len(seeds) == 72 and all(0 <= s < 2**63 for s in seeds)
    assert slot_seed(1, "a", 2) == slot_seed(1, "a", 2)


def test_temperature_is_chosen_by_validation_pass_rate_and_ties_take_the_lower():
    tasks = [task(f"v{i}", split="val") for i in range(4)]
    rates = {0.4: 1, 0.7: 3, 1.0: 3}

    async def at(some, temperature):
        async def trial(of, sample, seed):
            return rollout(of, seed, float(int(of.id[1:]) < rates[temperature]))

        return await evaluate(
            trial,
            some,
            policy=POLICY,
            suite="val",
            harness_digest="h",
            samples=2,
            temperature=temperature,
            seed=0,
        )

    choice = asyncio.run(choose_temperature(at, tasks, [1.0, 0.4, 0.7]))
    assert choice.temperature == 0.7
    assert choice.pass_at_1 == {0.4: 0.25, 0.7: 0.75, 1.0: 0.75}
    with pytest.raises(ConfigError, match="heldout"):
        asyncio.run(choose_temperature(at, [*tasks, task("h0")], [0.7]))
    with pytest.raises(ConfigError):
        asyncio.run(choose_temperature(at, tasks, []))
