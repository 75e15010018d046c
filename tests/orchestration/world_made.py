"""An in-memory trainer, engine and environment under one virtual clock, for the reconciler to be tried on.

Every ``collect`` lets a quarter of a second pass, in which trials end, fail or go on, a step and a weight swap
finish or not: whatever the seed says. Nothing waits for real time. ``kill_at`` ends the process at its n-th contact
with a service or the database, before or after the contact had its effect.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cadenza.core.errors import RolloutFailure
from cadenza.core.types import Rollout, Segment, Task, Verdict
from cadenza.orchestration.environment import Order, lost, replace_id
from cadenza.orchestration.placement import Remote
from cadenza.weights import ChainAddress, Link

TICK_S = 0.25
CHAIN = ChainAddress("memory://world")


class Killed(BaseException):
    """kill -9, as far as the reconciler can tell."""


@dataclass
class Disk:
    """What survives a kill: the last checkpoint, with the prompts its weights were trained on, step by step."""

    folder: Path
    checkpoint: list[list[str]] | None = None

    def save(self, history: list[list[str]]) -> None:
        self.checkpoint = [list(step) for step in history]
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "trainer.pt").touch()


@dataclass
class Habits:
    """How this world behaves. Shares are probabilities a tick; ``spread``: of a solved trial."""

    finish: float = 0.5
    slow_share: float = 0.0
    fail_share: float = 0.0
    spread: float = 0.5
    step_share: float = 0.4
    load_share: float = 0.5


@dataclass
class _Trial:
    order: Order
    version: int
    slow: bool


class World:
    """The three services; ``trainer``, ``engine``, ``environment`` are their handles."""

    def __init__(
        self, seed: int, disk: Disk, habits: Habits, kill_at: int = -1, max_ticks: int = 20_000
    ) -> None:
        self.rng, self.disk, self.habits = random.Random(seed), disk, habits
        self.kill_at, self.contacts = kill_at, 0
        self.ticks, self.max_ticks = 0, max_ticks
        self.history: list[list[str]] = []  # per trainer step, the prompts
        self.progress: list[float] = []  # how much of the run each trainer step was told is over
        self.lags: list[list[int]] = []  # per trainer step of this process, each group's lag
        self.trials: list[_Trial] = []
        self.ordered: list[str] = []
        self.serving = 0
        self.step: tuple[Future[Any], list[str]] | None = None
        self.swap: tuple[Future[Any], int] | None = None
        self.trainer = _Handle(self, "trainer")
        self.engine = _Handle(self, "engine")
        self.environment = _Handle(self, "environment")

    def clock(self) -> float:
        return self.ticks * TICK_S

    def contact(self, act: Callable[[], Any]) -> Any:
        """Does ``act`` unless this is where the process is killed."""
        self.contacts += 1
        if self.contacts == self.kill_at:
            if self.rng.random() < 0.5:
                act()
            raise Killed
        return act()

    # trainer

    def trainer_step(self, groups: list[list[Rollout]], progress: float) -> Future[Any]:
        assert self.step is None, "two steps at once"
        version = len(self.history)
        self.progress.append(progress)
        self.lags.append(
            [
                version - min((int(s.version_S.min()) for r in g for s in r.segments), default=version)
                for g in groups
            ]
        )
        self.step = (Future(), [g[0].task_id for g in groups])
        return self.step[0]

    def trainer_publish(self, _dtype: str) -> str:
        if (
            self.swap is not None
        ):  # the reconciler waits for the last swap before the next, and no tick would come
            self._swapped()
        return f"digest-{len(self.history)}"

    def trainer_save(self, _folder: str) -> None:
        self.disk.save(self.history)

    def trainer_restore(self, _folder: str) -> int:
        assert self.disk.checkpoint is not None
        self.history = [list(step) for step in self.disk.checkpoint]
        return len(self.history)

    def trainer_set_threads(self, _threads: int) -> None: ...

    # engine

    def engine_follow(self, chain: ChainAddress, version: int, _deadline_s: float) -> Future[Any]:
        assert chain == CHAIN and version == len(self.history) and self.swap is None
        self.swap = (Future(), version)
        if not self.trials:  # nothing ticks while nobody waits for a trial
            future = self.swap[0]
            self._swapped()
            return future
        if self.rng.random() < 0.5:
            future = self.swap[0]
            self._swapped()
            return future
        return self.swap[0]

    def _swapped(self) -> None:
        assert self.swap is not None
        (future, self.serving), self.swap = self.swap, None
        future.set_result(Link(self.serving, None, "", "", f"digest-{self.serving}", "", 10, 100))

    def engine_set_threads(self, _threads: int) -> None: ...

    def engine_stats(self) -> dict[str, float]:
        return {
            "busy_s": 0.0,
            "wall_s": 1.0,
            "swap_s": 0.0,
            "swaps": float(self.serving),
            "steps": float(self.ticks),
        }

    # environment

    def environment_submit(self, orders: list[Order]) -> None:
        for order in orders:
            self.ordered.append(order.task.id)
            self.trials.append(_Trial(order, self.serving, self.rng.random() < self.habits.slow_share))

    def environment_collect(self, _wait_s: float) -> list[tuple[tuple[str, int, int], Rollout]]:
        self.ticks += 1
        assert self.ticks < self.max_ticks, "the run does not end"
        if self.step is not None and self.rng.random() < self.habits.step_share:
            (future, prompts), self.step = self.step, None
            self.history.append(prompts)
            future.set_result({"parity_tokens": 0.0, "k3": 0.0})
        if self.swap is not None and self.rng.random() < self.habits.load_share:
            self._swapped()
        done = []
        self.rng.shuffle(self.trials)
        for trial in list(self.trials):
            if self.rng.random() < self.habits.finish * (0.05 if trial.slow else 1.0):
                self.trials.remove(trial)
                done.append((trial.order.slot, self._rollout(trial)))
        return done

    def environment_stats(self) -> dict[str, float]:
        return {"busy_s": 0.0, "wall_s": 1.0, "active": float(len(self.trials))}

    def environment_cancel(self) -> None:
        self.trials.clear()

    def _rollout(self, trial: _Trial) -> Rollout:
        order = trial.order
        if self.rng.random() < self.habits.fail_share:
            return replace_id(lost(order, "broke"), order)
        solved = float(self.rng.random() < self.habits.spread)
        price = -0.001 * order.slot[1]  # no two rollouts of a group cost the same
        versions = np.array([trial.version, self.serving], np.int32)
        segment = Segment(
            "act", np.arange(4, dtype=np.int32), np.array([False, False, True, True]), np.zeros(4, np.int8),
            np.zeros(2, np.float32), versions, [(2, 4)], "finish", {"temperature": 1.0}, {},
        )  # fmt: skip
        rollout = Rollout(
            "",
            order.slot[0],
            order.task.id,
            [segment],
            [],
            "",
            Verdict(solved),
            {"outcome": solved, "length": price},
            solved + price,
            "finished",
            {},
            0,
        )
        return replace_id(rollout, order)


class _Handle(Remote):
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def call(self, method: str, *args: Any) -> Future[Any]:
        found = self.world.contact(lambda: getattr(self.world, f"{self.name}_{method}")(*args))
        return found if isinstance(found, Future) else _done(found)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class MortalDatabase:
    """The real run database, whose writes are contacts at which the process may be killed."""

    WRITES = {"plan", "record_step", "rewind", "add_policy", "event"}

    def __init__(self, database: Any, world: World) -> None:
        self._database, self._world = database, world

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._database, name)
        if name not in self.WRITES:
            return method
        return lambda *args, **keys: self._world.contact(lambda: method(*args, **keys))


@dataclass
class Steps:
    """What a run reported, by step."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, step: int, row: dict[str, Any]) -> None:
        self.rows[step] = row


def tasks(count: int) -> list[Task]:
    return [
        Task(
            f"t{i:03}",
            Path(f"t{i:03}"),
            "train",
            1,
            "generated",
            "2026-01-01T00:00:00",
            {"families": [f"f{i % 3}"]},
        )
        for i in range(count)
    ]


FAILURE = RolloutFailure("sandbox_gone", "broke", retry=True, counts=False)
