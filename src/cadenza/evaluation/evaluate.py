"""Runs a policy over tasks: every rollout is the same trial that training runs, graded in a fresh sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cadenza.core.errors import ConfigError, DeadlineExceeded
from cadenza.core.types import Policy, Rollout, Task
from cadenza.evaluation.figures import machine
from cadenza.evaluation.result import EvalRecord, EvalResult, facts_of, record_of
from cadenza.evaluation.statistics import pass_at_k, require_valid
from cadenza.evaluation.suite import DEFAULT_LIMITS, EvalLimits, tasks_digest

VALIDATION_SPLIT = "val"

Trial = Callable[[Task, int, int], Awaitable[Rollout]]  # (task, sample, seed) -> one finished trial
OnRollout = Callable[[Task, EvalRecord, Rollout], None]


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
    trial: Trial, tasks: Sequence[Task], *, policy: Policy, suite: str, harness_digest: str, samples: int,
    temperature: float, seed: int, limits: EvalLimits = DEFAULT_LIMITS, on_rollout: OnRollout | None = None,
) -> EvalResult:  # fmt: skip
    """Runs `samples` trials of every task and returns all records, in task and sample order.

    Infrastructure failures that say so are tried again, `limits.retries` times; what then has no verdict
    stays without one. `on_rollout` sees each slot's last rollout as it finishes. Any exception of a trial
    stops the evaluation.

    Raises DeadlineExceeded after `limits.deadline_s`, TooManyInvalid below `limits.valid_floor`.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    slots = [(task, sample) for task in tasks for sample in range(samples)]
    records: list[EvalRecord | None] = [None] * len(slots)
    queue = iter(range(len(slots)))

    async def worker() -> None:
        for index in queue:
            task, sample = slots[index]
            attempts = 0
            while True:
                rollout = await trial(task, sample, slot_seed(seed, task.id, sample))
                attempts += 1
                failure = rollout.verdict.failure
                if failure is None or not failure.retry or attempts > limits.retries:
                    break
            records[index] = record = record_of(task, sample, rollout, attempts)
            if on_rollout is not None:
                on_rollout(task, record, rollout)

    try:
        async with asyncio.timeout(limits.deadline_s), asyncio.TaskGroup() as group:
            for _ in range(min(limits.concurrency, len(slots))):
                group.create_task(worker())
    except TimeoutError:
        done = sum(r is not None for r in records)
        raise DeadlineExceeded(
            f"evaluation of {policy.name!r} on {suite!r} had {done} of {len(slots)} rollouts "
            f"after {limits.deadline_s:.0f} s",
            "raise limits.deadline_s or evaluate fewer tasks",
        ) from None
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None

    result = EvalResult(
        policy=policy.name, policy_digest=policy.digest, policy_version=policy.version,
        suite=suite, suite_digest=tasks_digest(tasks), harness_digest=harness_digest,
        temperature=temperature, seed=seed, samples=samples,
        tasks={task.id: facts_of(task) for task in tasks},
        records=tuple(r for r in records if r is not None),
        started_at=started.isoformat(timespec="seconds"), wall_s=time.monotonic() - clock, machine=machine(),
    )  # fmt: skip
    require_valid(result.outcomes(), limits.valid_floor, f"{policy.name!r} on {suite!r}")
    return result


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
