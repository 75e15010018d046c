"""Measuring one model on one task set outside a recipe: what ``cadenza eval`` does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from cadenza.core.artifacts import verify_if_artifact
from cadenza.core.progress import Progress
from cadenza.core.types import Policy, Rollout, Task
from cadenza.evaluation.evaluate import evaluate, harness_digest
from cadenza.evaluation.result import EvalResult
from cadenza.evaluation.statistics import estimate, pass_at_k
from cadenza.evaluation.suite import EvalLimits
from cadenza.harness import Agent, demo_tools
from cadenza.orchestration.engine_metrics import metrics_of
from cadenza.orchestration.environment import EnvironmentConfig
from cadenza.orchestration.pool import RolloutPool
from cadenza.pipelines.services import (
    ServicesConfig,
    limits_and_engine,
    placement_of,
    spawn_engine,
    spawn_environment,
)
from cadenza.tasks.directory import load_tasks
from cadenza.tokens import CompactRenderer, Tokenizer


def measure_model(
    model: Path,
    tasks: Path,
    *,
    samples: int,
    temperature: float,
    limit: int | None,
    seed: int,
    progress: Progress,
) -> tuple[EvalResult, dict[str, float]]:
    """Runs ``samples`` trials of each task (of the first ``limit``) and grades them in fresh sandboxes. The agent has
    the limits that the model was trained under. Also what the engine counted, see ``orchestration.engine_metrics``.

    Raises:
        MissingArtifact, CorruptArtifact: no usable model, tokenizer or task set there.
        SandboxUnavailable: this machine allows no sandboxes. TooManyInvalid: too many trials have no verdict.
    """
    verify_if_artifact(model)
    chosen = load_tasks(tasks)[:limit]
    limits, engine_config = limits_and_engine(model)
    config = ServicesConfig(
        placement="in_process", engine=engine_config, environment=EnvironmentConfig(agent=limits)
    )
    agent = Agent(CompactRenderer(Tokenizer.load(model)), demo_tools(), limits)
    with placement_of(config) as placement:
        engine = spawn_engine(placement, config, model)
        environment = spawn_environment(placement, config, engine, model)

        async def run() -> tuple[EvalResult, dict[str, float]]:
            async with RolloutPool(environment) as pool:
                with progress.bar(model.name, len(chosen) * samples) as bar:

                    async def trial(task: Task, sample: int, trial_seed: int) -> Rollout:
                        return await pool.trial(task, sample, trial_seed, temperature)

                    result = await evaluate(
                        trial,
                        chosen,
                        policy=Policy(model.name, 0, None, ""),
                        suite=tasks.name,
                        harness_digest=harness_digest(agent),
                        samples=samples,
                        temperature=temperature,
                        seed=seed,
                        limits=EvalLimits(),
                        on_rollout=lambda task, sample, rollout: bar.advance(),
                    )
                    return result, await metrics_of(engine)

        return asyncio.run(run())


def figures_of(result: EvalResult, engine: dict[str, float]) -> dict[str, Any]:
    """What ``cadenza eval`` prints, JSON-ready: pass@1 and best of all samples with 95% intervals, tokens, contexts,
    shares of guessed tokens that held, what ended the runs, failures."""
    outcomes = result.outcomes()
    figures: dict[str, Any] = {
        "policy": result.policy,
        "suite": result.suite,
        "suite_digest": result.suite_digest,
        "tasks": len(result.tasks),
        "samples": result.samples,
        "temperature": result.temperature,
        "seed": result.seed,
    }
    rates = {"pass@1": 1} | ({f"best_of_{result.samples}": result.samples} if result.samples > 1 else {})
    for name, k in rates.items():
        rate = estimate([pass_at_k(outcomes, k)])
        figures[name] = {"value": rate.value, "interval": [rate.low, rate.high]}
    figures["mean_tokens"] = sum(r.tokens for r in result.records) / max(len(result.records), 1)
    figures["mean_contexts"] = sum(r.contexts or 0 for r in result.records) / max(len(result.records), 1)
    figures |= {name: share for name, share in engine.items() if name.startswith("accepted_")}
    figures["ended"] = result.endings()
    figures["failures"] = result.failures()
    figures["wall_s"] = round(result.wall_s, 1)
    return figures


def _samples(number: int) -> str:
    return "one sample each" if number == 1 else f"{number} samples each"


def sentence(figures: dict[str, Any]) -> str:
    """One readable paragraph of ``figures_of``."""
    rates = [
        f"{name} {100 * rate['value']:.1f}% (95% interval {100 * rate['interval'][0]:.1f} to "
        f"{100 * rate['interval'][1]:.1f})"
        for name, rate in figures.items()
        if isinstance(rate, dict) and "interval" in rate
    ]
    ended, lost = (
        ", ".join(f"{kind}: {count}" for kind, count in figures[key].items()) or "none"
        for key in ("ended", "failures")
    )
    held = ", ".join(f"{share:.0%}" for name, share in figures.items() if name.startswith("accepted_"))
    guesses = f"; {held} of the guessed tokens held, by place" if held else ""
    return (
        f"{figures['policy']} on {figures['tasks']} tasks of {figures['suite']}, {_samples(figures['samples'])} "
        f"at temperature {figures['temperature']:g}:\n  "
        + "\n  ".join(rates)
        + f"\n  {figures['mean_tokens']:.0f} sampled tokens and {figures['mean_contexts']:.1f} contexts a trial"
        f"{guesses}"
        f"\n  ended by {ended}; failures: {lost}; {figures['wall_s']:.0f} s"
    )
