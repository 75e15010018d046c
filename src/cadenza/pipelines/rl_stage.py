"""Stage ``rl``: asynchronous reinforcement learning from a policy on the training split."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from cadenza.core.config import StrictConfig, operational
from cadenza.core.errors import ServiceDied
from cadenza.core.extras import TRAIN
from cadenza.core.progress import Bar
from cadenza.core.types import Rollout, Task
from cadenza.evaluation.report_inputs import MetricWriter, Span, append_lines, read_metrics
from cadenza.harness import save_limits
from cadenza.orchestration.rl_run import RLRun, RunConfig, RunResult, Services
from cadenza.pipelines.services import (
    ServicesConfig,
    placement_of,
    spawn_engine,
    spawn_environment,
    tell_other_limits,
)
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.rollouts.record import to_bytes
from cadenza.tasks.directory import load_tasks

if TYPE_CHECKING:
    from cadenza.weights import ChainAddress

TAKE_SPANS_S = 30.0
CHAIN = "weights"


class WeightsConfig(StrictConfig):
    """How weights travel. ``store``: a folder or URL that trainer and engine reach; empty is the stage's own folder.
    ``anchor_every``: versions between two whole copies. ``keep_anchors``: whole copies that stay, with what follows
    them."""

    store: str = operational("")
    anchor_every: int = Field(default=25, gt=0)
    keep_anchors: int = Field(default=2, gt=0)


class RLConfig(RunConfig):
    """``split``: of the tasks that are prompts. ``trainer_threads``: cores of the trainer. ``keep_rollouts``: every so
    many of them is kept for inspection, in ``rollouts/`` (0: none). ``services``: engine and environments. ``weights``:
    how they travel from trainer to engine."""

    split: str = "train"
    trainer_threads: int = Field(default=1, gt=0)
    keep_rollouts: int = Field(default=0, ge=0)
    services: ServicesConfig = ServicesConfig()
    weights: WeightsConfig = WeightsConfig()


class RL(Stage[RLConfig]):
    """Artifact: a model directory (fp32). Input ``model``: the policy it starts from; ``tasks``: the task set."""

    Config = RLConfig
    version = 2
    packages = TRAIN
    inputs = ("model", "tasks")
    resumable = True

    def run(self, context: StageContext) -> Figures:
        from cadenza.inference.engine import torch_dtype
        from cadenza.pipelines.lm_loop import use_bf16
        from cadenza.tokens.tokenizer import Tokenizer
        from cadenza.training.trainer import TrainerService

        config = self.config
        tasks = load_tasks(context.input("tasks") / config.split)
        model = context.input("model")
        tell_other_limits(context, model, config.services.environment.agent)
        tokenizer = Tokenizer.load(model)
        dtype = str(torch_dtype(config.services.engine.dtype)).removeprefix("torch.")
        names = RunConfig.model_fields
        run_config = RunConfig.model_validate({k: v for k, v in config.model_dump().items() if k in names})
        chain = self._chain(context)
        with placement_of(config.services) as placement:
            engine = spawn_engine(placement, config.services, model)
            trainer = placement.spawn(
                "trainer", TrainerService, str(model), run_config.step, config.trainer_threads, use_bf16(), chain,
                threads=config.trainer_threads,
            )  # fmt: skip
            environment = spawn_environment(placement, config.services, engine, model)
            with (
                MetricWriter(context.out, context.name) as metrics,
                context.progress.bar(f"{context.name}, per cent", 100) as bar,
            ):
                told = _Told(config, context.out, metrics, bar)
                rl = RLRun(
                    Services(trainer, engine, environment, dtype, chain), tasks, run_config, context.seed_for("rl"),
                    context.database, context.rl_run, context.out / "checkpoint",
                    on_begin=told.begin, on_step=lambda step, row: told.step(rl, step, row), on_rollout=told.rollout,
                )  # fmt: skip
                result = rl.run()
            tokenizer.save(context.out)
            save_limits(config.services.environment.agent, context.out)
            trainer.call("export", str(context.out), tokenizer.id("<|bos|>"), tokenizer.id("<|end|>")).result(
                timeout=60
            )
        (context.out / "checkpoint" / "trainer.pt").unlink(missing_ok=True)
        # The last version lies in the artifact whole.
        shutil.rmtree((context.out / CHAIN).absolute(), ignore_errors=True)
        return self._figures(context, result)

    def _chain(self, context: StageContext) -> ChainAddress:
        """Where the run's weights are published."""
        from cadenza.weights import ChainAddress

        weights = self.config.weights
        return ChainAddress(
            weights.store or str((context.out / CHAIN).absolute()),
            context.rl_run.replace("/", "-") if weights.store else "chain",
            weights.anchor_every,
            weights.keep_anchors,
        )

    def _figures(self, context: StageContext, result: RunResult) -> Figures:
        ledger = context.database.ledger(context.rl_run)
        # With those of an earlier attempt at the stage.
        curves = read_metrics(context.out / "metrics" / f"{context.name}.jsonl")
        return {
            "steps": result.steps,
            "samples_trained": int(sum(curves.series("trained_samples")[1])),
            "stopped": result.stopped,
            "seconds": result.wall_s,
            "prompts_planned": len(ledger),
            "prompts_trained": sum(e.status == "trained" for e in ledger),
            **{f"{k}_busy": v for k, v in result.busy.items()},
        }


class _Told:
    """What a run tells while it goes: its bar, its metrics, its timeline, and every so many of its rollouts.

    The bar shows how far the run is by steps or by seconds, whichever are further gone, and moves between steps too.
    """

    def __init__(self, config: RLConfig, out: Path, metrics: MetricWriter, bar: Bar) -> None:
        self.config, self.out, self.metrics, self.bar = config, out, metrics, bar
        self.origin = time.monotonic()
        self.shown: dict[str, Any] = {"step": 0}
        self.rollouts = 0

    def begin(self, step: int, elapsed_s: float) -> None:
        self.origin = time.monotonic() - elapsed_s
        self.shown["step"] = step
        self._move(elapsed_s)

    def rollout(self, _task: Task, rollout: Rollout) -> None:
        self.rollouts += 1
        self._move(time.monotonic() - self.origin)
        if self.config.keep_rollouts and self.rollouts % self.config.keep_rollouts == 0:
            path = self.out / "rollouts" / f"{self.rollouts:06}.cdzr"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(to_bytes(rollout))

    def step(self, rl: RLRun, step: int, row: dict[str, Any]) -> None:
        self.metrics.write(row["elapsed_s"], step, **row)
        append_lines(self.out / "timeline.jsonl", _spans(rl, step, row))
        self.shown["step"] = step
        self.shown["solved"] = round(row["pass_rate"], 2) if "pass_rate" in row else "-"
        self._move(row["elapsed_s"])

    def _move(self, elapsed_s: float) -> None:
        by_seconds = elapsed_s / self.config.max_seconds
        by_steps = self.shown["step"] / max(1, self.config.max_steps)
        self.bar.set(100 * min(1.0, max(by_seconds, by_steps)), **self.shown)


def _spans(rl: RLRun, step: int, row: dict[str, Any]) -> list[Span]:
    """What the services did since the last step, on the clock of ``elapsed_s``. Raises ServiceDied."""
    end, first = row["elapsed_s"], rl.elapsed_before
    spans = [Span(lane="trainer", start=end - row["step_s"], end=end, label=f"step {step}")]
    for service in (rl.services.engine, rl.services.environment):
        try:
            taken = service.call("take_spans").result(timeout=TAKE_SPANS_S)
        except TimeoutError as error:
            raise ServiceDied("take_spans was not answered", "run the same command again to go on") from error
        at = [(lane, start - rl.origin, stop - rl.origin) for lane, start, stop in taken]
        # What came before the run (its first weights), or would lie over what an earlier process wrote.
        spans += [Span(lane=lane, start=max(a, first), end=b) for lane, a, b in at if b >= first]
    return spans
