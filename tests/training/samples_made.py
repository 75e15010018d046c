"""A small random policy, and rollouts of it built by hand with the log-probabilities it would have recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cadenza.core.errors import RolloutFailure
from cadenza.core.types import Rollout, Segment, Verdict
from cadenza.model.config import ModelConfig
from cadenza.model.transformer import PolicyModel
from cadenza.training.rl import Sample

VOCAB = 23
CONFIG = ModelConfig(
    vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, n_experts=3, d_expert=16,
    d_shared=16, max_positions=256,
)  # fmt: skip


def policy(seed: int = 0) -> PolicyModel:
    model = PolicyModel(CONFIG)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15 if p.dim() >= 2 else torch.ones(p.shape))
    return model


def token_logp(model: PolicyModel, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """(T - 1,): log-probability of ids[1:], by the plain definition, with gradients."""
    row = torch.tensor([list(ids)])
    logits = model.logits(model.hidden(row)[0])[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, row[0, 1:, None]).squeeze(1)


def segment(
    model: PolicyModel, seed: int, *, length: int = 20, temperature: float = 1.0, version: int = 0,
    finish: str = "finish", noise: float = 0.0, weights: str = "",
) -> Segment:  # fmt: skip
    """Random ids, about half of them sampled. ``noise``: standard deviation of the recorded log-probs' error."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, length).astype(np.int32)
    sampled = rng.random(length) < 0.5
    sampled[0], sampled[-1] = False, True
    with torch.no_grad():
        logp = token_logp(model, ids.tolist(), temperature).numpy()
    recorded = (logp[np.flatnonzero(sampled) - 1] + noise * rng.standard_normal(sampled.sum())).astype(
        np.float32
    )
    return Segment(
        "act", ids, sampled, np.zeros(length, np.int8), recorded,
        np.full(sampled.sum(), version, np.int32), [], finish, {"temperature": temperature},
        {"weights": f"{version}:{weights}"},
    )  # fmt: skip


def rollout(name: str, reward: float | None, segments: list[Segment], task: str = "t") -> Rollout:
    failure = RolloutFailure("sandbox_gone", "", retry=True, counts=False) if reward is None else None
    verdict = Verdict(None, failure) if failure else Verdict(float(reward == 1.0))
    status = "failed" if failure else "finished"
    return Rollout(name, "g", task, segments, [], "", verdict, {}, reward, status, {}, 0)


def sample(segment: Segment, advantage: float) -> Sample:
    return Sample(
        segment.ids_T, segment.sampled_T, segment.logprob_S, segment.version_S, advantage,
        segment.sampling["temperature"], segment.routes_TLK,
    )  # fmt: skip
