"""The RL run: slots, groups, staleness, the ledger, resume. Trainer, engine and environments overlap.

One loop in one thread decides everything and is the only writer of the run's lifecycle state:

1. feed:    while there is room, draw a prompt, plan it in the ledger, order its group's trials;
2. collect: a finished trial fills its slot; an infrastructure failure orders the slot again;
3. train:   when enough groups with a spread of rewards are ready and no token in flight would become too stale,
            start the trainer's next step;
4. publish: when the step ends, give the engine the new weights, record the step and its prompts in one
            transaction, and write the checkpoint.

``synchronous = true`` runs the same loop without overlap: feed one step's groups, drain, train, publish.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cadenza.core.config import StrictConfig
from cadenza.core.errors import CadenzaError, DeadlineExceeded, ResourceExhausted, ServiceDied
from cadenza.core.types import Policy, Rollout, Task
from cadenza.orchestration.curriculum import Curriculum, CurriculumConfig
from cadenza.orchestration.environment import Order
from cadenza.orchestration.placement import Remote
from cadenza.training.config import RLStepConfig

if TYPE_CHECKING:  # a dry run reads only the configuration above and need not wait for SQLAlchemy
    from cadenza.core.rundb import RunDatabase


class RunConfig(StrictConfig):
    """Keys of the run; the step's own are in ``step``.

    ``groups_per_step``: groups with a spread of rewards a step waits for; groups without one give no gradient, are
    recorded with the step that finds them, and at most ``most_groups_per_step`` of all are taken.
    ``groups_in_flight``: groups ordered ahead. ``max_staleness``: versions a token may be behind the trainer's next
    step (invariant 8); a straggler is waited for ``straggler_s`` seconds and then trained with its capped weight.
    ``synchronous`` turns the overlap off; the side that works then has ``synchronous_threads`` cores.
    ``max_steps`` or ``max_seconds`` end the run, whichever comes first.
    """

    max_steps: int = 60
    max_seconds: float = 600.0
    group_size: int = 8
    groups_per_step: int = 8
    most_groups_per_step: int = 32
    groups_in_flight: int = 14
    max_staleness: int = 4
    straggler_s: float = 30.0
    temperature: float = 1.0
    synchronous: bool = False
    synchronous_threads: int = 2
    attempts: int = 3
    checkpoint_every: int = 1
    step_deadline_s: float = 300.0
    idle_deadline_s: float = 120.0
    step: RLStepConfig = RLStepConfig()
    curriculum: CurriculumConfig = CurriculumConfig()


@dataclass
class _Group:
    id: str
    task: Task
    version: int  # policy version when it was ordered: no token of it is older
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    ordered: float = field(default_factory=time.monotonic)

    def spread(self) -> bool:
        rewards = {r.reward for r in self.rollouts.values() if r.reward is not None}
        return len(rewards) > 1


@dataclass(frozen=True)
class Services:
    """The three services of a run, spawned by the caller."""

    trainer: Remote
    engine: Remote
    environment: Remote
    serving_dtype: str


@dataclass
class RunResult:
    """How a run ended: ``steps`` of this and earlier processes, ``stopped`` steps | seconds | prompts."""

    steps: int
    stopped: str
    wall_s: float
    busy: dict[str, float]


class RLRun:
    """One RL run. ``run`` blocks until it ends; every step calls ``on_step(step, metrics)``."""

    def __init__(
        self,
        services: Services,
        tasks: Sequence[Task],
        config: RunConfig,
        seed: int,
        database: RunDatabase,
        rl_run: str,
        checkpoints: Path,
        *,
        on_step: Callable[[int, dict[str, Any]], None],
        on_rollout: Callable[[Task, Rollout], None] = lambda _t, _r: None,
    ) -> None:
        self.services, self.config, self.seed = services, config, seed
        self.database, self.rl_run, self.checkpoints = database, rl_run, checkpoints
        self.tasks = {t.id: t for t in tasks}
        self.curriculum = Curriculum(tasks, seed, config.curriculum)
        self.on_step, self.on_rollout = on_step, on_rollout
        self.version = 0
        self.flight: dict[str, _Group] = {}
        self.ready: list[_Group] = []
        self.retry_later: list[str] = []  # prompts planned before a crash, not trained yet
        self.training: tuple[Future[Any], list[_Group], float] | None = None
        self.loading: Future[Any] | None = None
        self.collecting: Future[Any] | None = None
        self.counts: Counter[str] = Counter()
        self.busy_trainer = 0.0
        self.rollouts_trained = 0
        self.elapsed_before = 0.0
        self.last_progress = time.monotonic()

    def run(self) -> RunResult:
        """Runs to ``max_steps`` or ``max_seconds``, or until the prompts are used up.

        Raises ServiceDied, DeadlineExceeded, or what a service raised; the last checkpoint is then whole.
        """
        self._resume()
        started = time.monotonic()
        stopped = ""
        while not stopped:
            elapsed = self.elapsed_before + time.monotonic() - started
            if self.training is None:
                if self.version >= self.config.max_steps:
                    stopped = "steps"
                elif elapsed >= self.config.max_seconds:
                    stopped = "seconds"
                elif not self.flight and not self.ready and not self.curriculum.left and not self.retry_later:
                    stopped = "prompts"
            if stopped:
                break
            self._feed()
            self._collect()
            self._train(started)
            if time.monotonic() - self.last_progress > self.config.idle_deadline_s:
                raise DeadlineExceeded(
                    f"no rollout and no step for {self.config.idle_deadline_s:.0f} s "
                    f"({len(self.flight)} groups in flight)",
                    "look at the run's log; run the same command again to go on",
                )
        self._call(self.services.environment, "cancel")
        wall = time.monotonic() - started
        return RunResult(self.version, stopped, self.elapsed_before + wall, self._busy(wall))

    # resume

    def _resume(self) -> None:
        """Goes on from the last checkpoint: weights, steps, the ledger, the curriculum's rates."""
        if (self.checkpoints / "trainer.pt").is_file():
            self.version = self._call(self.services.trainer, "restore", str(self.checkpoints))
            self.database.rewind(self.rl_run, self.version)
            steps = self.database.steps(self.rl_run)
            if steps:
                self.curriculum.rates = dict(steps[-1].metrics.get("strata", {}))
                self.elapsed_before = float(steps[-1].metrics.get("elapsed_s", 0.0))
                self.rollouts_trained = int(steps[-1].metrics.get("rollouts_trained", 0))
            self._publish(wait=True)
        else:
            self.database.rewind(self.rl_run, -1)
        entries = self.database.ledger(self.rl_run)
        self.curriculum.forget({e.task_id for e in entries})
        self.retry_later = [e.task_id for e in entries if e.status == "planned"]

    # feed

    def _feed(self) -> None:
        limit = self.config.groups_in_flight
        if self.config.synchronous:
            if self.training is not None or self.loading is not None:
                return
            limit = self.config.groups_per_step - sum(g.spread() for g in self.ready)
        orders: list[Order] = []
        planned: list[tuple[str, str]] = []
        ahead = len(self.flight) + (0 if self.config.synchronous else self._surplus())
        while ahead < limit:
            if self.retry_later:
                task = self.tasks[self.retry_later.pop()]
            else:
                drawn = self.curriculum.draw()
                if drawn is None:
                    break
                task = drawn
                planned.append((task.id, task.id))
            group = _Group(task.id, task, self.version)
            self.flight[group.id] = group
            orders += [self._order(group, member) for member in range(self.config.group_size)]
            ahead += 1
        if planned:
            # Planned before ordered: a crash in between leaves a prompt to be run again, never one run unseen.
            self.database.plan(self.rl_run, self.version + 1, planned)
        if orders:
            self._call(self.services.environment, "submit", orders)

    def _surplus(self) -> int:
        """Ready groups beyond what the next step takes: they hold back feeding, or they would go stale."""
        return max(0, sum(g.spread() for g in self.ready) - self.config.groups_per_step)

    def _order(self, group: _Group, member: int) -> Order:
        attempt = group.attempts[member]
        group.attempts[member] += 1
        text = f"{self.seed}/{group.id}/{member}/{attempt}"
        seed = int.from_bytes(_digest(text), "big") >> 1
        return Order((group.id, member, attempt), group.task, seed, self.config.temperature)

    # collect

    def _collect(self) -> None:
        if self.collecting is None:
            self.collecting = self.services.environment.call("collect", 0.25)
        waited = [self.collecting]
        if self.training is not None:
            waited.append(self.training[0])
        wait_futures(waited, timeout=1.0, return_when="FIRST_COMPLETED")
        if not self.collecting.done():
            return
        done, self.collecting = self.collecting.result(), None
        again: list[Order] = []
        for (group_id, member, _), rollout in done:
            self.last_progress = time.monotonic()
            group = self.flight.get(group_id)
            if group is None or member in group.rollouts:
                continue
            failure = rollout.verdict.failure
            if failure is not None and failure.retry and group.attempts[member] < self.config.attempts:
                self.counts[f"retried_{failure.kind}"] += 1
                self.database.event(self.rl_run, "retry", {"slot": rollout.id, "failure": failure.kind})
                again.append(self._order(group, member))
                continue
            group.rollouts[member] = rollout
            self.on_rollout(group.task, rollout)
            if len(group.rollouts) == self.config.group_size:
                del self.flight[group_id]
                self.ready.append(group)
                rewards = [r.reward for r in group.rollouts.values() if r.reward is not None]
                if rewards:
                    self.curriculum.observe(group.task, sum(rewards) / len(rewards))
        if again:
            self._call(self.services.environment, "submit", again)

    # train and publish

    def _train(self, started: float) -> None:
        if self.loading is not None and self.loading.done():
            self.loading.result()
            self.loading = None
        if self.training is not None:
            future, groups, begun = self.training
            if future.done():
                self._finish_step(future.result(), groups, begun, started)
            elif time.monotonic() - begun > self.config.step_deadline_s:
                raise DeadlineExceeded(
                    f"step {self.version + 1} took over {self.config.step_deadline_s:.0f} s",
                    "raise step_deadline_s or make the batch smaller",
                )
            return
        groups = self._next_batch()
        if groups:
            if self.config.synchronous:
                self._set_threads(training=True)
            rollouts = [list(g.rollouts.values()) for g in groups]
            self.training = (self.services.trainer.call("step", rollouts), groups, time.monotonic())

    def _next_batch(self) -> list[_Group]:
        """The groups of the next step, or nothing yet."""
        informative = sum(g.spread() for g in self.ready)
        enough = (
            informative >= self.config.groups_per_step or len(self.ready) >= self.config.most_groups_per_step
        )
        last = not self.flight and not self.curriculum.left and not self.retry_later and self.ready
        if self.config.synchronous:
            enough = enough and not self.flight
        if not (enough or last) or self._too_stale():
            return []
        taken: list[_Group] = []
        wanted = self.config.groups_per_step
        for group in sorted(self.ready, key=lambda g: g.version):
            if wanted == 0 or len(taken) == self.config.most_groups_per_step:
                break
            taken.append(group)
            wanted -= group.spread()
        self.ready = [g for g in self.ready if g not in taken]
        return taken

    def _too_stale(self) -> bool:
        """Whether the step would leave a group in flight more than ``max_staleness`` behind."""
        late = [g for g in self.flight.values() if self.version + 1 - g.version > self.config.max_staleness]
        stuck = [g for g in late if time.monotonic() - g.ordered > self.config.straggler_s]
        if late and len(stuck) < len(late):
            return True
        self.counts["stragglers"] += len(stuck)
        return False

    def _finish_step(
        self, metrics: dict[str, float], groups: list[_Group], begun: float, started: float
    ) -> None:
        self.training = None
        self.last_progress = time.monotonic()
        self.version += 1
        self.busy_trainer += time.monotonic() - begun
        self._check_parity(metrics)
        digest = self._publish(wait=self.config.synchronous)
        if self.config.synchronous:
            self._set_threads(training=False)
        self.rollouts_trained += sum(len(g.rollouts) for g in groups)
        now = time.monotonic()
        row: dict[str, Any] = {
            **metrics,
            **group_metrics([list(g.rollouts.values()) for g in groups]),
            "rollouts_trained": float(self.rollouts_trained),
            "groups": float(len(groups)),
            "groups_with_spread": float(sum(g.spread() for g in groups)),
            "group_lag": statistics.fmean(self.version - 1 - g.version for g in groups),
            "in_flight": float(len(self.flight)),
            "ready": float(len(self.ready)),
            "elapsed_s": self.elapsed_before + now - started,
            "step_s": now - begun,
            **{k: float(v) for k, v in self.counts.items()},
            **{f"{k}_busy": v for k, v in self._busy(now - started).items()},
        }
        recorded = {**row, "strata": dict(self.curriculum.rates), "weights": digest}
        if self.version % self.config.checkpoint_every == 0:
            try:
                self._call(self.services.trainer, "save", str(self.checkpoints))
            except OSError as error:
                raise ResourceExhausted(
                    f"the checkpoint could not be written ({error.strerror})", "free disk space and run again"
                ) from error
        self.database.record_step(
            self.rl_run, self.version, self.version, recorded, trained=[g.task.id for g in groups]
        )
        self.on_step(self.version, row)

    def _publish(self, wait: bool) -> str:
        state, digest = self._call(self.services.trainer, "weights", self.services.serving_dtype)
        self.database.add_policy(
            self.rl_run, Policy("policy", self.version, self.version - 1 if self.version else None, digest)
        )
        self.loading = self.services.engine.call("load", state, self.version, digest)
        if wait:
            self.loading.result(timeout=60)
            self.loading = None
        return digest

    def _check_parity(self, metrics: dict[str, float]) -> None:
        step = self.config.step
        bf16 = self.services.serving_dtype == "bfloat16"
        limit = step.parity_limit_bf16 if bf16 else step.parity_limit_fp32
        if metrics["parity_tokens"] >= 500 and metrics["k3"] > limit:
            raise CadenzaError(
                f"trainer and engine disagree at the same version: mean k3 {metrics['parity_k3']:.4g} > {limit:g}",
                "check the engine's dtype and weights; set step.parity_limit_* if the limit is wrong",
            )

    def _set_threads(self, training: bool) -> None:
        most = self.config.synchronous_threads
        self._call(self.services.trainer, "set_threads", most if training else 1)
        self._call(self.services.engine, "set_threads", 1 if training else most)

    def _busy(self, wall: float) -> dict[str, float]:
        engine = self._call(self.services.engine, "stats")
        environment = self._call(self.services.environment, "stats")
        return {
            "trainer": min(1.0, self.busy_trainer / max(wall, 1e-9)),
            "engine": engine["busy_s"] / max(engine["wall_s"], 1e-9),
            "env": environment["busy_s"] / max(environment["wall_s"], 1e-9),
        }

    def _call(self, service: Remote, method: str, *args: Any) -> Any:
        try:
            return service.call(method, *args).result(timeout=self.config.step_deadline_s)
        except TimeoutError as error:
            raise ServiceDied(f"{method} did not answer", "run the same command again to go on") from error


def _digest(text: str) -> bytes:
    import hashlib

    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def group_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Means over the rollouts of a step: reward, solved, tokens, turns, failures, tokens by version spread."""
    rollouts = [r for group in groups for r in group]
    scored = [r for r in rollouts if r.reward is not None]
    solved = [float(r.verdict.score == 1.0) for r in scored]
    spans = [
        len(np.unique(np.concatenate([s.version_S for s in r.segments]))) > 1 for r in scored if r.segments
    ]
    finish = Counter(r.segments[-1].finish_reason for r in scored if r.segments)
    n = max(1, len(scored))
    return {
        "rollouts": float(len(rollouts)),
        "failed_rollouts": float(len(rollouts) - len(scored)),
        "reward": sum(float(r.reward or 0.0) for r in scored) / n,
        "pass_rate": sum(solved) / n,
        "tokens_per_rollout": sum(r.sampled_tokens for r in scored) / n,
        "context_per_rollout": sum(sum(len(s.ids_T) for s in r.segments) for r in scored) / n,
        "turns": sum(sum(len(s.turns) for s in r.segments) for r in scored) / n,
        "spans_versions": sum(spans) / n,
        "finished_itself": finish["finish"] / n,
    }
