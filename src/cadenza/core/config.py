"""Base of every configuration object: unknown keys are refused, values are immutable."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictConfig(BaseModel):
    """A pydantic model that rejects keys it does not know, so that a typo fails in one second and not after a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)
