"""Runs a policy over tasks: every rollout is the same trial that training runs, graded in a fresh sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from cadenza.core.errors import ConfigError, DeadlineExceeded, ForeignSample
from cadenza.core.types import Policy, Rollout, Task, parse_weights
from cadenza.evaluation.figures import machine
from cadenza.evaluation.result import EvalResult, facts_of, record_of
from cadenza.evaluation.statistics import pass_at_k, require_valid
from cadenza.evaluation.suite import DEFAULT_LIMITS, EvalLimits, tasks_digest
from cadenza.harness import Agent
from cadenza.harness.agent import HARNESS_DIGEST
from cadenza.rollouts.driver import Trial, run_trials
from cadenza.rollouts.trial import Deadlines, run_trial
from cadenza.tokens import Sampling, TokenSession

VALIDATION_SPLIT = "val"

RunTrial = Callable[[Task, int, int], Awaitable[Rollout]]  # (task, sample, seed) -> one finished trial
OnRollout = Callable[[Task, int, Rollout], None]  # (task, sample, rollout)
OpenSession = Callable[[Task, int, int], TokenSession]  # (task, sample, seed) -> a session the trial closes


@dataclass(frozen=True)
class TemperatureChoice:
    """The temperature with the best validation pass@1, and the whole table it was chosen from."""

    temperature: float
    pass_at_1: dict[float, float]


def slot_seed(seed: int, task_id: str, sample: int) -> int:
    """Seed of one rollout, the same for every policy and machine, independent of order: 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{task_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def evaluate(
    run: RunTrial, tasks: Sequence[Task], *, policy: Policy, suite: str, harness_digest: str, samples: int,
    temperature: float, seed: int, limits: EvalLimits = DEFAULT_LIMITS, on_rollout: OnRollout | None = None,
) -> EvalResult:  # fmt: skip
    """Runs `samples` trials of every task and returns all records, in task and sample order.

    Infrastructure failures that say so are tried again, `limits.retries` times; what then has no verdict
    stays without one. `on_rollout` sees each slot's last rollout as it finishes. Any exception of a trial
    stops the evaluation.

    Raises DeadlineExceeded after `limits.deadline_s`, TooManyInvalid below `limits.valid_floor`, ForeignSample when the
    engine says that it served other weights than the policy's, or several.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    slots = [(task, sample) for task in tasks for sample in range(samples)]
    planned = [Trial(task, slot_seed(seed, task.id, sample), str(sample)) for task, sample in slots]
    tries: Counter[int] = Counter()

    async def run_one(trial: Trial) -> Rollout:
        tries[trial.seed] += 1
        return await run(trial.task, int(trial.group_id), trial.seed)

    def done(_: int, trial: Trial, rollout: Rollout) -> None:
        if on_rollout is not None:
            on_rollout(trial.task, int(trial.group_id), rollout)

    try:
        async with asyncio.timeout(limits.deadline_s) as deadline:
            rollouts = await run_trials(
                planned, run_one, concurrency=limits.concurrency, attempts=1 + limits.retries, on_done=done
            )
    except TimeoutError:
        if not deadline.expired():
            raise
        raise DeadlineExceeded(
            f"evaluation of {policy.name!r} on {suite!r} started {len(tries)} of {len(slots)} rollouts "
            f"and did not end within {limits.deadline_s:.0f} s",
            "raise limits.deadline_s or evaluate fewer tasks",
        ) from None
    records = [
        record_of(task, sample, rollout, tries[rollout.seed])
        for (task, sample), rollout in zip(slots, rollouts, strict=True)
    ]
    result = EvalResult(
        policy=policy.name, policy_digest=_served(policy, rollouts), policy_version=policy.version,
        suite=suite, suite_digest=tasks_digest(tasks), harness_digest=harness_digest,
        temperature=temperature, seed=seed, samples=samples,
        tasks={task.id: facts_of(task) for task in tasks},
        records=tuple(records),
        started_at=started.isoformat(timespec="seconds"), wall_s=time.monotonic() - clock, machine=machine(),
    )  # fmt: skip
    require_valid(result.outcomes(), limits.valid_floor, f"{policy.name!r} on {suite!r}")
    return result


def _served(policy: Policy, rollouts: Sequence[Rollout]) -> str:
    """The digest of the weights that made the rollouts, as the engine echoed it; empty for a scripted policy."""
    segments = [s for rollout in rollouts for s in rollout.segments]
    served = {d for s in segments for d in parse_weights(s.digests.get("weights", "")).values()}
    known = served | {policy.digest} - {""}
    if len(known) > 1:
        raise ForeignSample(
            f"{policy.name!r} was evaluated on weights {' and '.join(sorted(known))}",
            "give the evaluation an engine of its own and run it again",
        )
    return next(iter(known), "")


async def evaluate_policy(
    open_session: OpenSession, tasks: Sequence[Task], backend: Any, agent: Agent, *, policy: Policy, suite: str,
    samples: int, temperature: float, seed: int, limits: EvalLimits = DEFAULT_LIMITS,
    sampling: Sampling | None = None, on_rollout: OnRollout | None = None,
) -> EvalResult:  # fmt: skip
    """`evaluate` with real trials: `agent` in sandboxes of `backend`, each rollout on a session of its own.

    `sampling` gives what temperature leaves open (tokens a turn). The agent's own limits bound a trial,
    `limits.grade_deadline_s` its grading.
    """
    sampling = replace(sampling or Sampling(), temperature=temperature)
    deadlines = Deadlines(grade_s=limits.grade_deadline_s)

    async def run(task: Task, sample: int, trial_seed: int) -> Rollout:
        return await run_trial(
            task, open_session(task, sample, trial_seed), backend, agent, sampling, trial_seed,
            f"eval/{suite}/{task.id}/{sample}", deadlines,
        )  # fmt: skip

    return await evaluate(
        run, tasks, policy=policy, suite=suite, harness_digest=harness_digest(agent), samples=samples,
        temperature=temperature, seed=seed, limits=limits, on_rollout=on_rollout,
    )  # fmt: skip


def harness_digest(agent: Agent) -> str:
    """Identity of everything between the policy and the verdict that is code or limit: loop, tools, bounds."""
    parts = [HARNESS_DIGEST, agent.tools.digest, agent.limits.model_dump_json()]
    return hashlib.blake2b("/".join(parts).encode(), digest_size=8).hexdigest()


async def choose_temperature(
    run: Callable[[Sequence[Task], float], Awaitable[EvalResult]],
    tasks: Sequence[Task],
    temperatures: Sequence[float],
) -> TemperatureChoice:
    """Evaluates `run(tasks, temperature)` over the grid and takes the best pass@1, the lower one of a tie.

    Only validation tasks are accepted: a temperature tuned on held-out tasks would flatter what is then
    measured on them. Raises ConfigError for any other split or an empty grid.
    """
    wrong = sorted({t.split for t in tasks} - {VALIDATION_SPLIT})
    if wrong or not tasks or not temperatures:
        got = wrong or "nothing to choose from"
        raise ConfigError(
            f"a temperature is chosen on the {VALIDATION_SPLIT!r} split only, got {got}",
            f"pass tasks of the {VALIDATION_SPLIT!r} split and at least one temperature",
        )
    table: dict[float, float] = {}
    for temperature in sorted(set(temperatures)):
        rates = pass_at_k((await run(tasks, temperature)).outcomes()).values_N
        table[temperature] = float(rates[rates == rates].mean())  # NaN: a task without any verdict
    return TemperatureChoice(max(table, key=lambda t: table[t]), table)
