"""Spawning the services of a stage: one engine, one environment service, and for RL a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from cadenza.core.config import StrictConfig, differences
from cadenza.harness import Limits, limits_of
from cadenza.inference.requests import EngineConfig
from cadenza.orchestration.environment import EnvironmentConfig, EnvironmentService
from cadenza.orchestration.placement import Placement, Remote, make_placement
from cadenza.pipelines.stages import StageContext


class ServicesConfig(StrictConfig):
    """``placement``: ray (one actor a service) or in_process. ``ray_address``: empty for a private local Ray.
    ``engine``: what samples; ``environment``: where agents work and are graded."""

    placement: Literal["ray", "in_process"] = "ray"
    ray_address: str = ""
    engine: EngineConfig = EngineConfig()
    environment: EnvironmentConfig = EnvironmentConfig()

    @model_validator(mode="after")
    def _engine_can_serve_the_agents(self) -> ServicesConfig:
        wanted, room = self.environment.sandboxes, self.engine.slots
        if wanted > room:
            raise ValueError(f"environment.sandboxes is {wanted}, more than engine.slots, {room}")
        wanted, room = self.environment.agent.max_context_tokens, self.engine.max_context
        if wanted > room:
            raise ValueError(
                f"environment.agent.max_context_tokens is {wanted}, more than engine.max_context, {room}"
            )
        return self


def limits_and_engine(model: Path) -> tuple[Limits, EngineConfig]:
    """The limits that a model was trained under, and an engine with room for its contexts. Raises CorruptArtifact."""
    limits = limits_of(model) or Limits()
    return limits, EngineConfig(max_context=max(EngineConfig().max_context, limits.max_context_tokens))


def tell_other_limits(context: StageContext, model: Path, limits: Limits) -> list[str]:
    """Says where agents would work under other limits than those that the model was trained under, which it may not
    know how to keep to. Returns what differs, ``key: trained -> here``. Raises CorruptArtifact."""
    trained = limits_of(model)
    if trained is None:
        return []
    here, there = (each.model_dump(mode="json", exclude={"wall_s"}) for each in (limits, trained))
    changed = differences(there, here)
    if changed:
        told = (
            f"{context.name}: the model in {model.name} was trained under other limits: {'; '.join(changed)}"
        )
        context.progress.line(told)
        context.logger.warning("%s", told)
    return changed


@contextmanager
def placement_of(config: ServicesConfig) -> Iterator[Placement]:
    with make_placement(config.placement, config.ray_address or None) as placement:
        yield placement


def spawn_engine(placement: Placement, config: ServicesConfig, model: Path) -> Remote:
    """An engine serving the model directory as policy version 0."""
    from cadenza.inference.service import EngineService

    return placement.spawn("engine", EngineService, str(model), config.engine, threads=config.engine.threads)


def spawn_environment(
    placement: Placement, config: ServicesConfig, engine: Remote, tokenizer: Path
) -> Remote:
    """Environments that sample from ``engine``."""
    return placement.spawn("environment", EnvironmentService, engine, str(tokenizer), config.environment)
