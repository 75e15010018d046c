"""The only shapes that cross rooms (design, "core types").

Letters: T all tokens of a segment, S the sampled ones among them, L MoE layers, K experts per token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from cadenza.core.errors import RolloutFailure

UNREAD = 255  # in ``Segment.routes_TLK``: no expert, the engine did not read this token
FORMAT_VERSION = 1  # of every serialized type below; readers refuse what they do not know


class TokenKind(IntEnum):
    """What a token is for; the length penalty weighs kinds apart (Composer 2, section 4.2)."""

    OTHER = 0  # prompt: system and user text, role markers
    THINK = 1
    CALL = 2  # the model's tool call
    OUTPUT = 3  # a tool's result
    FINAL = 4  # the model's closing message


@dataclass(frozen=True, slots=True)
class Task:
    """A Harbor task directory with its identity. ``id`` is the hash of the content, never a row number."""

    id: str
    directory: Path
    split: str
    ambiguity: int  # 0 precise, 1 symptom only, 2 vague, 3 told in another file
    source: str
    created_at: str  # ISO 8601
    metadata: dict[str, Any] = field(
        default_factory=dict
    )  # task.toml [metadata]: families, edits, files, ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grade of one patch: a finite score, or a failure. Exactly one of the two is set."""

    score: float | None
    failure: RolloutFailure | None = None
    tests: dict[str, str] = field(default_factory=dict)  # test id -> passed | failed | error | missing
    report: str | None = None

    def __post_init__(self) -> None:
        if (self.score is None) == (self.failure is None):
            raise ValueError("a verdict has a score or a failure, and not both")
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"a score must be finite, got {self.score}")


@dataclass(slots=True)
class Segment:
    """One context window: the ids the engine saw and what it sampled, in order. Never re-encoded (invariant 2).

    Shapes: ``ids_T`` int32, ``sampled_T`` bool, ``token_kind_T`` int8, ``logprob_S`` float32 (of the distribution
    that was sampled from, temperature included), ``version_S`` int32, ``routes_TLK`` uint8 (which experts the engine
    sent a token to, in each layer; UNREAD where it read none) or None.
    ``turns``: half-open (start, end) ranges into T, one per sampled turn.
    """

    kind: str  # act | summary
    ids_T: np.ndarray
    sampled_T: np.ndarray
    token_kind_T: np.ndarray
    logprob_S: np.ndarray
    version_S: np.ndarray
    turns: list[tuple[int, int]]
    finish_reason: str  # finish | max_turns | max_tokens | context | budget | errors | deadline
    sampling: dict[str, float]
    digests: dict[str, str]  # harness, tools, renderer; weights as ``format_weights`` writes them
    parent: int | None = None
    routes_TLK: np.ndarray | None = None

    def broken(self) -> str | None:
        """The invariant this segment violates, or None. A broken segment is masked and counted, never padded."""
        sampled = int(self.sampled_T.sum())
        if len(self.ids_T) != len(self.sampled_T) or len(self.ids_T) != len(self.token_kind_T):
            return "ids_T, sampled_T and token_kind_T differ in length"
        if len(self.logprob_S) != sampled or len(self.version_S) != sampled:
            return "logprob_S and version_S must have one entry per sampled token"
        if sampled and not np.isfinite(self.logprob_S).all():
            return "logprob_S is not finite"
        return None


@dataclass(slots=True)
class Rollout:
    """One trial of one task by one policy."""

    id: str
    group_id: str
    task_id: str
    segments: list[Segment]
    trace: list[dict[str, Any]]  # readable turns: {"call"|"final"|"output": ..., "error_kind": ...}
    patch: str
    verdict: Verdict
    rewards: dict[str, float]
    reward: float | None  # None exactly when the verdict is a failure that does not count
    status: str  # finished | failed
    timings: dict[str, float]  # seconds: lease, agent, engine_wait, tools, grade
    seed: int
    branched_from: tuple[str, int] | None = None

    @property
    def sampled_tokens(self) -> int:
        """Tokens the policy sampled, over all segments."""
        return int(sum(int(s.sampled_T.sum()) for s in self.segments))


@dataclass(frozen=True, slots=True)
class Policy:
    """A named version of the weights; aliases live in the run database."""

    name: str
    version: int
    parent: int | None
    digest: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A saved sandbox state."""

    id: str
    parent: str | None
    backend: str
    mode: str  # full | filesystem
    digest: str
    bytes: int


def format_weights(weights: Mapping[int, str]) -> str:
    """Policy versions and the digests of their weights as one word: ``3:0f1e2d3c4b5a6978,4:...``; empty for none."""
    return ",".join(f"{version}:{digest}" for version, digest in sorted(weights.items()))


def parse_weights(text: str) -> dict[int, str]:
    """What ``format_weights`` wrote. Raises ValueError for anything else."""
    pairs = (entry.split(":") for entry in text.split(",") if entry)
    return {int(version): digest for version, digest in pairs}


def to_plain(value: Any) -> Any:
    """Recursively turns the types above into JSON-ready values (arrays become lists, paths strings)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value
