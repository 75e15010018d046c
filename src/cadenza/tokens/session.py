"""The token seam between the agent and whatever samples: an engine, a scripted expert, a recorder.

It lies in this room because both sides need it and neither imports the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one turn. Temperature 0 is greedy. ``max_tokens`` bounds the turn; so do the agent's limits, to
    which the default leaves it."""

    temperature: float = 1.0
    max_tokens: int = 1 << 16

    def plain(self) -> dict[str, float]:
        """As ``Segment.sampling`` keeps it."""
        return {"temperature": self.temperature, "max_tokens": float(self.max_tokens)}


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled turn: for each id its log-probability under the distribution sampled from, and the policy version.

    ``finish``: ``stop`` after the end of a call or a final, ``length`` when ``max_tokens`` cut the turn.
    ``weights``: digest of the weights that the engine served under each policy version, empty for a scripted policy.
    ``routes_TLJ``: the experts that each token of the context went to in each layer, for the tokens that the engine has
    read since the last turn; None from what has none. The last id of a turn is read with the next one.
    ``note`` goes into the trace; a scripted policy marks deliberate mistakes with it.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length"]
    note: str | None = None
    weights: Mapping[int, str] = field(default_factory=dict)
    routes_TLJ: np.ndarray | None = None


class SessionLost(Exception):
    """The engine behind a session is gone or answered nonsense; the trial stops and is run again elsewhere."""


class TokenSession(Protocol):
    """One growing context. The session keeps the canonical ids; only what is new is passed, nothing is re-encoded."""

    async def sample(self, new_ids: list[int], sampling: Sampling) -> Sampled:
        """Appends ``new_ids`` and samples a turn, which becomes part of the context. Raises SessionLost."""
        ...

    def renew(self) -> None:
        """Frees the context and begins another: the next ``new_ids`` are its first."""
        ...

    def close(self) -> None:
        """Frees the context; idempotent."""
        ...
