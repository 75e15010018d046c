"""What clients and engine say to each other. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from cadenza.core.config import StrictConfig


class EngineConfig(StrictConfig):
    """``slots``: sessions alive at once. ``max_context``: tokens per session. ``step_tokens``: most tokens fed in one
    step; longer prompts take several. ``threads``: cores of its products.

    ``dtype``: bfloat16, float32, or auto (bfloat16 where the CPU has instructions for it). ``niceness``: how far the
    engine's thread stands back (0..19) where others want its core. It runs whenever one row is ready, so it would take
    that core from the tools and the trainer for steps of few rows; standing back it finds more rows in each.

    ``draft_tokens``: tokens that the model's MTP heads guess ahead for a decoding row, checked in one pass (speculative
    decoding): 0 is none, auto as many as it has heads. What is sampled is the same. ``draft_rows``: guessing stops
    while more rows than this decode: a step of many rows is bound by its arithmetic, and rejected guesses cost as much
    as accepted ones.
    """

    slots: int = Field(default=96, gt=0)
    max_context: int = Field(default=1536, gt=1)
    # Rows that decode go first, prompts get what they leave.
    step_tokens: int = Field(default=512, gt=0)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    threads: int = Field(default=1, gt=0)
    niceness: int = Field(default=10, ge=0, le=19)
    draft_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    draft_rows: int = Field(default=8, gt=0)


class Sampling(StrictConfig):
    """``temperature`` 0 is greedy. ``stop_ids``: sampling ends after any of them. No top-p or top-k: they would make
    the recorded log-probabilities those of a truncated distribution."""

    temperature: float = 1.0
    max_tokens: int = Field(default=96, gt=0)
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One turn of a session: append ``new_ids`` to its canonical prefix, then sample. No new ids: go on sampling."""

    session: str
    new_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Completion:
    """What was sampled. ``finish``: stop | length (max_tokens) | context (the session is full) | refused (nothing was
    done; ``reason`` says why).

    ``versions``: policy version that produced each token; a swap in mid-request shows as a change inside it.
    ``weights``: digest of the weights that the engine served under each of these versions.
    ``routes_TLJ``: uint8, the experts that each token went to in each layer, for the tokens of the session that were
    fed since its last completion. The last sampled one is fed with the next turn.
    """

    session: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: str
    reason: str = ""
    weights: Mapping[int, str] = field(default_factory=dict)
    routes_TLJ: np.ndarray | None = None
