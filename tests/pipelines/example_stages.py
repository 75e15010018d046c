"""Real, small stages that the runner's tests chain: they write, read, count, resume, and fail in every way."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from cadenza.core.config import StrictConfig, operational
from cadenza.core.errors import CorruptCheckpoint, ServiceDied
from cadenza.pipelines import Figures, Stage, StageContext


class NumbersConfig(StrictConfig):
    count: int = 3
    seed: int = 9  # the runner's name: never set from a recipe, never printed into one
    threads: int = operational(1)


class Numbers(Stage[NumbersConfig]):
    """Writes 0..count-1, one a line."""

    Config = NumbersConfig

    def run(self, context: StageContext) -> Figures:
        assert list(context.out.glob("*.txt")) == [], "a stage that is not resumable starts empty"
        (context.out / "numbers.txt").write_text("\n".join(str(n) for n in range(self.config.count)))
        context.telemetry.log("numbers", count=self.config.count)
        return {"count": self.config.count}


class Sum(Stage[StrictConfig]):
    """Adds what every input wrote."""

    inputs = ("numbers",)
    open_inputs = True

    def run(self, context: StageContext) -> Figures:
        total = 0
        for role in context.artifacts:
            total += sum(int(n) for n in (context.input(role) / "numbers.txt").read_text().split())
        (context.out / "sum.txt").write_text(str(total))
        return {"sum": total}


class CounterConfig(StrictConfig):
    steps: int = 5
    stop_at: int | None = operational(None)  # a fault, not a result: an interrupted run is resumed without it
    fault: str = operational("kill")
    wait_for: str = operational("")


class Counter(Stage[CounterConfig]):
    """Counts step by step, keeping its place in ``out`` and its steps in the database, and fails as it is told."""

    Config = CounterConfig
    resumable = True

    def run(self, context: StageContext) -> Figures:
        place = context.out / "place.txt"
        begun = int(place.read_text()) if context.resumed and place.exists() else 0
        context.database.rewind(context.rl_run, begun)
        with context.progress.bar(context.name, total=self.config.steps) as bar:
            bar.set(begun)
            for step in range(begun + 1, self.config.steps + 1):
                if step == self.config.stop_at:
                    self._fail(context)
                context.database.plan(context.rl_run, step, [(f"task{step}", f"group{step}")])
                context.database.record_step(context.rl_run, step, step, {"n": step}, trained=[f"task{step}"])
                place.write_text(str(step))
                bar.advance()
        return {"steps": self.config.steps, "begun_at": begun}

    def _fail(self, context: StageContext) -> None:
        fault = self.config.fault
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "interrupt":
            raise KeyboardInterrupt
        elif fault == "service":
            raise ServiceDied("the engine ended", "run the same command again to go on")
        elif fault == "defect":
            raise ZeroDivisionError("a defect\nof two lines")
        elif fault == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        elif fault == "memory":
            raise MemoryError
        elif fault == "torch_memory":  # as torch words it
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
            )
        elif fault == "engine_memory":
            raise ServiceDied("the inference engine failed: RuntimeError: can't allocate memory", "try again")
        elif fault == "checkpoint":
            raise CorruptCheckpoint("it is torn", "add --restart-from STAGE to begin the stage again")
        elif fault == "disk":
            (context.out / "large.bin").write_bytes(b"x" * 10_000_000)
        elif fault == "wait":  # tells the test that it is here, and waits to be stopped
            Path(self.config.wait_for).write_text("here")
            deadline = time.monotonic() + 180
            while time.monotonic() < deadline:
                signal.sigtimedwait([signal.SIGUSR2], 0.05)


class NeedsTorch(Stage[StrictConfig]):
    """Imports torch where a stage should: inside ``run``."""

    def run(self, context: StageContext) -> Figures:
        import torch

        return {"torch": torch.__version__}


class NotAStage:
    """For the error of a kind that is something else."""
