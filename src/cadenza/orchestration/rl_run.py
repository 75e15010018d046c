"""The RL run: slots, groups, staleness, the ledger, resume. Trainer, engine and environments overlap.

One loop in one thread decides everything and is the only writer of the run's lifecycle state:

1. feed:    while there is room, draw a prompt, plan it in the ledger, order its group's trials;
2. collect: a finished trial fills its slot; an infrastructure failure orders the slot again;
3. train:   when enough groups with a spread of outcomes are ready and no token in flight would become too stale,
            start the trainer's next step;
4. publish: when the step ends, give the engine the new weights, record the step and its prompts in one
            transaction, and write the checkpoint.

``synchronous = true`` runs the same loop without overlap: feed one step's groups, drain, train, publish.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.errors import (
    CadenzaError,
    CorruptArtifact,
    DeadlineExceeded,
    ResourceExhausted,
    ServiceDied,
)
from cadenza.core.types import Policy, Rollout, Task
from cadenza.orchestration.curriculum import Curriculum, CurriculumConfig
from cadenza.orchestration.engine_metrics import EngineMetrics
from cadenza.orchestration.environment import Order
from cadenza.orchestration.group_metrics import group_metrics
from cadenza.orchestration.placement import Remote
from cadenza.training.config import RLStepConfig

if TYPE_CHECKING:  # a dry run reads only the configuration above and need not wait for SQLAlchemy
    from cadenza.core.rundb import RunDatabase
    from cadenza.weights import ChainAddress, Link


class RunConfig(StrictConfig):
    """What a run does, and when it ends.

    ``groups_per_step``: groups with a spread of outcomes a step waits for (Yu et al., "DAPO", section 3.2: filtered by
    what was solved); ``most_groups_per_step``: groups a step takes at most, those without a spread included: they go
    into the step that finds them. Where length or a behaviour has a price, those have a gradient too, but nearly every
    group has that, and a step that counted them would hold little of what tells solved from failed.
    ``groups_in_flight``: groups ordered ahead. ``max_staleness``: versions a token may be behind the trainer's next
    step (invariant 8); ``straggler_s``: seconds that a step waits for a group that it would make older, which is then
    trained with its capped weight when it comes. ``synchronous``: turns the overlap off; ``synchronous_threads``: cores
    that the side which works then has. ``max_steps``: optimizer steps after which the run ends; ``max_seconds``:
    seconds after which it ends, if they are over first. ``step``: keys of one optimizer step. ``curriculum``: which
    prompt next. ``group_size``: rollouts a prompt. ``temperature``: of sampling. ``attempts``: trials of one rollout
    that the infrastructure fails. ``checkpoint_every``: steps. ``step_deadline_s``: seconds a step of the trainer may
    take. ``idle_deadline_s``: seconds without any rollout or step after which the run ends.
    """

    max_steps: int = Field(default=60, ge=0)
    max_seconds: float = Field(default=600.0, gt=0)
    group_size: int = Field(default=8, gt=0)
    groups_per_step: int = Field(default=8, gt=0)
    most_groups_per_step: int = Field(default=32, gt=0)
    groups_in_flight: int = Field(default=14, gt=0)
    max_staleness: int = Field(default=4, ge=0)
    straggler_s: float = Field(default=30.0, ge=0)
    temperature: float = Field(default=1.0, gt=0)
    synchronous: bool = False
    synchronous_threads: int = Field(default=2, gt=0)
    attempts: int = Field(default=3, gt=0)
    checkpoint_every: int = Field(default=1, gt=0)
    step_deadline_s: float = Field(default=300.0, gt=0)
    idle_deadline_s: float = Field(default=120.0, gt=0)
    step: RLStepConfig = RLStepConfig()
    curriculum: CurriculumConfig = CurriculumConfig()


@dataclass
class _Group:
    id: str
    task: Task
    version: int  # policy version that the engine had when it was ordered: no token of it is older
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    late_since: float | None = None  # when it first held the trainer's next step back
    straggler: bool = False  # it was waited for in vain

    def spread(self) -> bool:
        """Whether some of its rollouts solved more of the task than others, whatever they cost."""
        scores = {r.verdict.score or 0.0 for r in self.rollouts.values() if r.reward is not None}
        return len(scores) > 1


@dataclass(frozen=True)
class Services:
    """The three services of a run, spawned by the caller, and the chain that ``trainer`` publishes to."""

    trainer: Remote
    engine: Remote
    environment: Remote
    serving_dtype: str
    chain: ChainAddress


@dataclass
class RunResult:
    """How a run ended: ``steps`` of this and earlier processes, ``stopped`` steps | seconds | prompts."""

    steps: int
    stopped: str
    wall_s: float
    busy: dict[str, float]


class RLRun:
    """One RL run. ``run`` blocks until it ends; it calls ``on_begin(step, elapsed_s)`` with where an earlier process
    left it, and ``on_step(step, metrics)`` after every step."""

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
        on_begin: Callable[[int, float], None] = lambda _step, _elapsed_s: None,
        on_rollout: Callable[[Task, Rollout], None] = lambda _t, _r: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.services, self.config, self.seed = services, config, seed
        self.database, self.rl_run, self.checkpoints = database, rl_run, checkpoints
        self.tasks = {t.id: t for t in tasks}
        self.curriculum = Curriculum(tasks, seed, config.curriculum)
        self.on_begin, self.on_step, self.on_rollout, self.clock = on_begin, on_step, on_rollout, clock
        self.max_staleness = 0 if config.synchronous else config.max_staleness
        self.version = 0  # the trainer's
        self.served = 0  # the newest that the engine is known to have
        self.flight: dict[str, _Group] = {}
        self.ready: list[_Group] = []
        self.retry_later: list[str] = []  # prompts planned before a crash, not trained yet
        self.training: tuple[Future[Any], list[_Group], float] | None = None
        self.loading: tuple[Future[Link], float] | None = None  # the engine on its way, and since when
        self.swapped: dict[str, float] = {}  # of the last one that arrived
        self.collecting: Future[Any] | None = None
        self.counts: Counter[str] = Counter()
        self.busy_trainer = 0.0
        self.engine_metrics = EngineMetrics()
        self.rollouts_trained = 0
        self.elapsed_before = 0.0
        self.origin = 0.0  # when elapsed_s would have been 0, in seconds since 1970
        self.last_progress = clock()

    def run(self) -> RunResult:
        """Runs to ``max_steps`` or ``max_seconds``, or until the prompts are used up.

        Raises ServiceDied, DeadlineExceeded, or what a service raised; the last checkpoint is then whole.
        """
        self._resume()
        self.on_begin(self.version, self.elapsed_before)
        started = self.clock()
        self.origin = time.time() - self.elapsed_before
        stopped = ""
        while not stopped:
            elapsed = self.elapsed_before + self.clock() - started
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
            if self.clock() - self.last_progress > self.config.idle_deadline_s:
                raise DeadlineExceeded(
                    f"no rollout and no step for {self.config.idle_deadline_s:.0f} s "
                    f"({len(self.flight)} groups in flight)",
                    "run the same command again to go on, or raise STAGE.idle_deadline_s with --restart-from STAGE",
                )
        self._call(self.services.environment, "cancel")
        wall = self.clock() - started
        return RunResult(
            self.version, stopped, self.elapsed_before + wall, self._busy(wall, self._engine_stats())
        )

    # resume

    def _resume(self) -> None:
        """Goes on from the last checkpoint: weights, steps, the ledger, the curriculum's signals."""
        if (self.checkpoints / "trainer.pt").is_file():
            self.version = self._call(self.services.trainer, "restore", str(self.checkpoints))
            self.database.rewind(self.rl_run, self.version)
            steps = self.database.steps(self.rl_run)
            # A step is recorded before its checkpoint is written, so the ledger is never behind unless it was lost.
            if self.version and (not steps or steps[-1].step < self.version):
                raise CorruptArtifact(
                    f"the checkpoint has made {self.version} steps, and the run database knows of "
                    f"{steps[-1].step if steps else 0}: it cannot tell which prompts were trained on",
                    "bring the run database back, or make the stage again with --restart-from",
                )
            if steps:
                self.curriculum.signals = dict(steps[-1].metrics.get("signals", {}))
                self.elapsed_before = float(steps[-1].metrics.get("elapsed_s", 0.0))
                self.rollouts_trained = int(steps[-1].metrics.get("rollouts_trained", 0))
        else:
            self.database.rewind(self.rl_run, -1)
        self._publish(wait=True)
        entries = self.database.ledger(self.rl_run)
        self.curriculum.forget({e.task_id for e in entries})
        self.retry_later = [e.task_id for e in entries if e.status == "planned"]

    # feed

    def _feed(self) -> None:
        limit = self.config.groups_in_flight
        if not self.max_staleness and (self.training or self.loading or self._enough()):
            return  # what is ordered now would hold the next step back, and so on until no prompt is left
        if self.version + (self.training is not None) - self.served > self.max_staleness:
            return  # too stale before its step begins: the engine takes weights more slowly than the trainer makes them
        if self.config.synchronous:
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
            group = _Group(task.id, task, self.served)
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
            self.last_progress = self.clock()
            group = self.flight.get(group_id)
            if group is None or member in group.rollouts:
                continue
            failure = rollout.verdict.failure
            if failure is not None and failure.retry and group.attempts[member] < self.config.attempts:
                self.counts[f"retried_{failure.kind}"] += 1
                self.database.event(self.rl_run, "retry", {"slot": rollout.id, "failure": failure.kind})
                again.append(self._order(group, member))
                continue
            if failure is not None and failure.retry:
                self._check_health()  # a dead service fails every trial at once: stop before it uses up the prompts
            group.rollouts[member] = rollout
            self.on_rollout(group.task, rollout)
            if len(group.rollouts) == self.config.group_size:
                del self.flight[group_id]
                self.ready.append(group)
                solved = [r.verdict.score == 1.0 for r in group.rollouts.values() if r.reward is not None]
                if solved:
                    self.curriculum.observe(group.task, sum(solved) / len(solved))
        if again:
            self._call(self.services.environment, "submit", again)

    # train and publish

    def _train(self, started: float) -> None:
        if self.loading is not None and self.loading[0].done():
            self._loaded()
        if self.training is not None:
            future, groups, begun = self.training
            if future.done():
                self._finish_step(future.result(), groups, begun, started)
            elif self.clock() - begun > self.config.step_deadline_s:
                raise DeadlineExceeded(
                    f"step {self.version + 1} took over {self.config.step_deadline_s:.0f} s",
                    "raise STAGE.step_deadline_s or lower STAGE.groups_per_step, with --restart-from STAGE",
                )
            return
        groups = self._next_batch()
        if groups:
            if self.config.synchronous:
                self._set_threads(training=True)
            rollouts = [list(g.rollouts.values()) for g in groups]
            step = self.services.trainer.call("step", rollouts, self._progress(started))
            self.training = (step, groups, self.clock())

    def _progress(self, started: float) -> float:
        """How much of the run is over, 0..1, by steps or by seconds."""
        elapsed = self.elapsed_before + self.clock() - started
        by_steps = self.version / max(1, self.config.max_steps)
        return min(1.0, max(by_steps, elapsed / max(self.config.max_seconds, 1e-9)))

    def _next_batch(self) -> list[_Group]:
        """The groups of the next step, or nothing yet: the oldest first, and beyond the usual number those that
        one more step would make too stale."""
        enough = self._enough()
        last = not self.flight and not self.curriculum.left and not self.retry_later and self.ready
        if self.config.synchronous:
            enough = enough and not self.flight
        if not (enough or last) or self._too_stale():
            return []
        taken: list[_Group] = []
        wanted = self.config.groups_per_step
        for group in sorted(self.ready, key=lambda g: g.version):
            full = wanted == 0 or len(taken) >= self.config.most_groups_per_step
            if full and self.version + 1 - group.version <= self.max_staleness:
                break
            taken.append(group)
            wanted = max(0, wanted - group.spread())
        self.ready = [g for g in self.ready if g not in taken]
        return taken

    def _too_stale(self) -> bool:
        """Whether the step would leave a group in flight more than ``max_staleness`` behind."""
        now = self.clock()
        waiting = False
        for group in self.flight.values():
            if self.version + 1 - group.version <= self.max_staleness or group.straggler:
                continue
            if group.late_since is None:
                group.late_since = now
            if now - group.late_since < self.config.straggler_s:
                waiting = True
            else:
                group.straggler = True
                self.counts["stragglers"] += 1
        return waiting

    def _enough(self) -> bool:
        """Whether the ready groups are worth a step."""
        informative = sum(g.spread() for g in self.ready)
        return (
            informative >= self.config.groups_per_step or len(self.ready) >= self.config.most_groups_per_step
        )

    def _finish_step(
        self, metrics: dict[str, float], groups: list[_Group], begun: float, started: float
    ) -> None:
        self.training = None
        self.last_progress = self.clock()
        self.version += 1
        self.busy_trainer += self.clock() - begun
        self._check_parity(metrics)
        digest = self._publish(wait=self.config.synchronous)
        if self.config.synchronous:
            self._set_threads(training=False)
        self.rollouts_trained += sum(len(g.rollouts) for g in groups)
        now, engine = self.clock(), self._engine_stats()
        row: dict[str, Any] = {
            **metrics,
            **group_metrics([list(g.rollouts.values()) for g in groups]),
            "rollouts_trained": float(self.rollouts_trained),
            "groups": float(len(groups)),
            "groups_with_spread": float(sum(g.spread() for g in groups)),
            "group_lag": statistics.fmean(self.version - 1 - g.version for g in groups),
            "in_flight": float(len(self.flight)),
            "ready": float(len(self.ready)),
            **self.swapped,
            "elapsed_s": self.elapsed_before + now - started,
            "step_s": now - begun,
            **{k: float(v) for k, v in self.counts.items()},
            **{f"{k}_busy": v for k, v in self._busy(now - started, engine).items()},
            **self.engine_metrics.since_last(engine),
        }
        recorded = {**row, "signals": dict(self.curriculum.signals), "weights": digest}
        dropped = [g.task.id for g in groups if all(r.reward is None for r in g.rollouts.values())]
        trained = [g.task.id for g in groups if g.task.id not in dropped]
        # Recorded before the checkpoint: a crash in between makes the step anew from older weights. The other way
        # round the ledger would let prompts be trained on that the checkpoint has seen.
        self.database.record_step(
            self.rl_run, self.version, self.version, recorded, trained=trained, dropped=dropped
        )
        if self.version % self.config.checkpoint_every == 0:
            try:
                self._call(self.services.trainer, "save", str(self.checkpoints))
            except OSError as error:
                raise ResourceExhausted(
                    f"the checkpoint could not be written ({error.strerror})", "free disk space and run again"
                ) from error
        self.on_step(self.version, row)

    def _publish(self, wait: bool) -> str:
        begun = self.clock()
        digest = self._call(self.services.trainer, "publish", self.services.serving_dtype)
        self.database.add_policy(
            self.rl_run, Policy("policy", self.version, self.version - 1 if self.version else None, digest)
        )
        if self.loading is not None:
            self._loaded()
        following = self.services.engine.call(
            "follow", self.services.chain, self.version, self.config.step_deadline_s / 2
        )
        self.loading = (following, begun)
        if wait:
            self._loaded()
        return digest

    def _loaded(self) -> None:
        """Waits until the engine has the weights last sent to it."""
        assert self.loading is not None
        following, begun = self.loading
        link: Link = self._answer(following, "the engine's follow")
        self.loading, self.served = None, link.version
        self.swapped = {
            "delta_bytes": float(link.bytes),
            "weights_bytes": float(link.full_bytes),
            "sync_s": self.clock() - begun,
        }

    def _check_parity(self, metrics: dict[str, float]) -> None:
        step = self.config.step
        bf16 = self.services.serving_dtype == "bfloat16"
        limit = step.parity_limit_bf16 if bf16 else step.parity_limit_fp32
        if metrics["parity_tokens"] >= 500 and metrics["k3"] > limit:
            raise CadenzaError(
                f"trainer and engine disagree at the same version: mean k3 {metrics['k3']:.4g} > {limit:g}",
                "set STAGE.services.engine.dtype to float32, or raise STAGE.step.parity_limit_*, "
                "with --restart-from STAGE",
            )

    def _set_threads(self, training: bool) -> None:
        most = self.config.synchronous_threads
        self._call(self.services.trainer, "set_threads", most if training else 1)
        self._call(self.services.engine, "set_threads", 1 if training else most)

    def _engine_stats(self) -> dict[str, float]:
        return self._call(self.services.engine, "stats")

    def _busy(self, wall: float, engine: dict[str, float]) -> dict[str, float]:
        environment = self._call(self.services.environment, "stats")
        return {
            "trainer": min(1.0, self.busy_trainer / max(wall, 1e-9)),
            "engine": engine["busy_s"] / max(engine["wall_s"], 1e-9),
            "env": environment["busy_s"] / max(environment["wall_s"], 1e-9),
        }

    def _call(self, service: Remote, method: str, *args: Any) -> Any:
        return self._answer(service.call(method, *args), method)

    def _answer(self, future: Future[Any], name: str) -> Any:
        try:
            return future.result(timeout=self.config.step_deadline_s)
        except TimeoutError as error:
            raise ServiceDied(f"{name} did not answer", "run the same command again to go on") from error

    def _check_health(self) -> None:
        """Raises what ended a service that can no longer serve."""
        self._engine_stats()
        self._call(self.services.environment, "stats")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
