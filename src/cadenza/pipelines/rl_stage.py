"""Stage ``rl``: asynchronous reinforcement learning from a policy on the training split."""

from __future__ import annotations

import shutil
import time
from typing import Any

from pydantic import Field

from cadenza.core.config import StrictConfig, operational
from cadenza.core.errors import ServiceDied
from cadenza.core.extras import TRAIN
from cadenza.core.types import Rollout, Task
from cadenza.evaluation.report_inputs import MetricWriter, Span, append_lines, read_metrics
from cadenza.harness import save_limits
from cadenza.orchestration.rl_run import RLRun, RunConfig, Services
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
        from cadenza.weights import ChainAddress

        config = self.config
        tasks = load_tasks(context.input("tasks") / config.split)
        model = context.input("model")
        tell_other_limits(context, model, config.services.environment.agent)
        tokenizer = Tokenizer.load(model)
        dtype = str(torch_dtype(config.services.engine.dtype)).removeprefix("torch.")
        names = RunConfig.model_fields
        run_config = RunConfig.model_validate({k: v for k, v in config.model_dump().items() if k in names})
        kept = 0
        own = (context.out / CHAIN).absolute()
        chain = ChainAddress(
            config.weights.store or str(own),
            context.rl_run.replace("/", "-") if config.weights.store else "chain",
            config.weights.anchor_every,
            config.weights.keep_anchors,
        )
        origin = time.monotonic()  # of the bar, which moves between steps too where time ends the run
        shown: dict[str, Any] = {"step": 0}

        def percent(elapsed_s: float) -> float:
            return 100 * min(
                1.0, max(elapsed_s / config.max_seconds, shown["step"] / max(1, config.max_steps))
            )

        def on_begin(step: int, elapsed_s: float) -> None:
            nonlocal origin
            origin = time.monotonic() - elapsed_s
            shown["step"] = step
            bar.set(percent(elapsed_s), **shown)

        def on_rollout(_task: Task, rollout: Rollout) -> None:
            nonlocal kept
            kept += 1
            bar.set(percent(time.monotonic() - origin), **shown)
            if config.keep_rollouts and kept % config.keep_rollouts == 0:
                path = context.out / "rollouts" / f"{kept:06}.cdzr"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(to_bytes(rollout))

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

                def on_step(step: int, row: dict[str, Any]) -> None:
                    metrics.write(row["elapsed_s"], step, **row)
                    append_lines(context.out / "timeline.jsonl", _spans(rl, step, row))
                    shown["step"] = step
                    shown["solved"] = round(row["pass_rate"], 2) if "pass_rate" in row else "-"
                    bar.set(percent(row["elapsed_s"]), **shown)

                rl = RLRun(
                    Services(trainer, engine, environment, dtype, chain), tasks, run_config, context.seed_for("rl"),
                    context.database, context.rl_run, context.out / "checkpoint",
                    on_begin=on_begin, on_step=on_step, on_rollout=on_rollout,
                )  # fmt: skip
                result = rl.run()
            tokenizer.save(context.out)
            save_limits(config.services.environment.agent, context.out)
            trainer.call("export", str(context.out), tokenizer.id("<|bos|>"), tokenizer.id("<|end|>")).result(
                timeout=60
            )
        (context.out / "checkpoint" / "trainer.pt").unlink(missing_ok=True)
        shutil.rmtree(own, ignore_errors=True)  # the last version lies in the artifact whole
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
