"""The whole RL step: advantages, packing, the policy-gradient loss, one optimizer update.

Objective (Composer 2, section 4.1): group-relative advantage, mean-centred, not divided by the
group's standard deviation; no division by response length, one constant denominator; single epoch; truncated
importance weight of the trainer's over the engine's log-probability; KL to the reference, if any, as k1 inside
the advantage (as a loss its expected gradient would be zero).
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cadenza.core.errors import CadenzaError, TrainingDiverged
from cadenza.core.types import UNREAD, Rollout, Segment
from cadenza.model.logprobs import token_logprobs
from cadenza.model.replay import Replay, ReplayCounts
from cadenza.model.transformer import PolicyModel
from cadenza.training.config import RLStepConfig


@dataclass(frozen=True)
class Sample:
    """One segment, ready to train: the shapes of ``core.types.Segment`` with the rollout's advantage."""

    ids_T: np.ndarray
    sampled_T: np.ndarray
    logprob_S: np.ndarray
    version_S: np.ndarray
    advantage: float
    temperature: float
    routes_TLK: np.ndarray | None = None


def group_advantages(rollouts: Sequence[Rollout]) -> list[float | None]:
    """Advantage of each rollout of one group: reward minus the mean over the group's distinct rollouts.

    A rollout without a reward (an infrastructure failure) takes no part and gets None. A group of one, or
    one with no spread, gives zeros (invariant 4).
    """
    by_id = {r.id: r.reward for r in rollouts if r.reward is not None}
    if len(set(by_id.values())) < 2:  # the mean of equal numbers may round to another one
        return [None if r.reward is None else 0.0 for r in rollouts]
    mean = sum(by_id.values()) / len(by_id)
    return [None if r.reward is None else r.reward - mean for r in rollouts]


def thin(advantages: Sequence[float], most: int, key: str) -> list[float]:
    """Weights that keep at most ``most`` of a group's rollouts, but one of each class (equal advantage) at least.

    0 for those left out, else how many of its class each kept one stands for. Classes share the places evenly; the
    draw is seeded by ``key``. The weighted sum of advantages is that of the whole group, and its gradient is in
    expectation.
    """
    classes: dict[float, list[int]] = defaultdict(list)
    for index, advantage in enumerate(advantages):
        if advantage != 0.0:
            classes[advantage].append(index)
    weights = [0.0] * len(advantages)
    left, rng = most, random.Random(key)
    for position, (_, members) in enumerate(sorted(classes.items(), key=lambda c: (len(c[1]), c[0]))):
        share = max(1, left // (len(classes) - position))
        kept = rng.sample(members, min(share, len(members)))
        left -= len(kept)
        for index in kept:
            weights[index] = len(members) / len(kept)
    return weights


@dataclass
class Batch:
    """What one step trains on, and what was left out and why."""

    samples: list[Sample]
    rollouts: int
    broken: int = 0
    masked_overlong: int = 0


def make_batch(
    groups: Sequence[Sequence[Rollout]],
    mask_overlong: bool,
    samples_per_group: int = 0,
    *,
    keep_zero: bool = False,
) -> Batch:
    """Samples of every rollout with a non-zero advantage, thinned to ``samples_per_group`` if that is not 0.

    Broken segments are masked and counted (invariant 2); a zero advantage has no gradient and is not worth its
    forward pass, unless a KL term acts on it too (``keep_zero``).
    """
    batch = Batch([], 0)
    for group in groups:
        found = group_advantages(group)
        batch.rollouts += sum(a is not None for a in found)
        advantages = [a or 0.0 for a in found]
        weights = [1.0] * len(advantages)
        if samples_per_group:
            weights = thin(advantages, samples_per_group, group[0].group_id)
        for rollout, advantage, weight in zip(group, advantages, weights, strict=True):
            if rollout.reward is None or weight == 0.0 or (advantage == 0.0 and not keep_zero):
                continue
            overlong = any(
                s.finish_reason in ("context", "max_tokens", "max_turns", "budget") for s in rollout.segments
            )
            if mask_overlong and overlong:
                batch.masked_overlong += 1
                continue
            _add(batch, rollout, advantage * weight)
    return batch


def single_batch(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> Batch:
    """Samples of rollouts that have no group: one answer a prompt, as users get it, with an advantage each."""
    batch = Batch([], len(rollouts))
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        if advantage != 0.0:
            _add(batch, rollout, advantage)
    return batch


def _add(batch: Batch, rollout: Rollout, advantage: float) -> None:
    """Every segment of the chain carries the same advantage, summaries too."""
    for s in rollout.segments:
        if s.broken() is not None or s.sampled_T[:1].any():  # nothing predicts a first token
            batch.broken += 1
        elif s.sampled_T.any():
            batch.samples.append(_sample(s, advantage))


def _sample(s: Segment, advantage: float) -> Sample:
    temperature = float(s.sampling.get("temperature", 1.0)) or 1.0
    return Sample(s.ids_T, s.sampled_T, s.logprob_S, s.version_S, advantage, temperature, s.routes_TLK)


@dataclass
class _Packed:
    """A microbatch: rows padded to one length, and per sampled token (N) what the loss needs."""

    ids_BT: Tensor
    at_N: Tensor  # flat index into B x T of the position that predicts the token
    target_N: Tensor
    behaviour_N: Tensor
    version_N: Tensor
    oldest_N: Tensor  # oldest version in the token's segment: its cached keys may be that old
    advantage_N: Tensor
    temperature: float
    routes_MLK: Tensor | None  # of all M = B x T tokens; UNREAD in padding


def pack(samples: Sequence[Sample], tokens_per_microbatch: int, multiple: int = 64) -> list[_Packed]:
    """Groups samples of one temperature and similar length into microbatches of bounded padded size."""
    by_temperature: dict[float, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_temperature[sample.temperature].append(sample)
    out: list[_Packed] = []
    for temperature, members in sorted(by_temperature.items()):
        pending: list[Sample] = []
        for sample in sorted(members, key=lambda s: -len(s.ids_T)):
            width = -(-len(pending[0].ids_T if pending else sample.ids_T) // multiple) * multiple
            if pending and width * (len(pending) + 1) > tokens_per_microbatch:
                out.append(_pad(pending, temperature, multiple))
                pending = []
            pending.append(sample)
        if pending:
            out.append(_pad(pending, temperature, multiple))
    return out


def _pad(samples: Sequence[Sample], temperature: float, multiple: int) -> _Packed:
    t = -(-max(len(s.ids_T) for s in samples) // multiple) * multiple
    ids_BT = np.zeros((len(samples), t), dtype=np.int64)
    at, target, behaviour, version, oldest, advantage = [], [], [], [], [], []
    for b, s in enumerate(samples):
        ids_BT[b, : len(s.ids_T)] = s.ids_T
        positions = np.flatnonzero(s.sampled_T)
        at.append(b * t + positions - 1)
        target.append(s.ids_T[positions])
        behaviour.append(s.logprob_S)
        version.append(s.version_S)
        oldest.append(np.full(len(positions), s.version_S.min()))
        advantage.append(np.full(len(positions), s.advantage, dtype=np.float32))
    return _Packed(
        torch.from_numpy(ids_BT),
        torch.from_numpy(np.concatenate(at).astype(np.int64)),
        torch.from_numpy(np.concatenate(target).astype(np.int64)),
        torch.from_numpy(np.concatenate(behaviour).astype(np.float32)),
        torch.from_numpy(np.concatenate(version).astype(np.int64)),
        torch.from_numpy(np.concatenate(oldest).astype(np.int64)),
        torch.from_numpy(np.concatenate(advantage)),
        temperature,
        _routes(samples, t),
    )


def _routes(samples: Sequence[Sample], t: int) -> Tensor | None:
    """None unless every sample has them."""
    found = [s.routes_TLK for s in samples]
    if any(routes is None for routes in found):
        return None
    assert found[0] is not None
    routes_BTLK = np.full((len(samples), t, *found[0].shape[1:]), UNREAD, np.int64)
    for b, routes in enumerate(found):
        assert routes is not None
        routes_BTLK[b, : len(routes)] = routes
    return torch.from_numpy(routes_BTLK).flatten(0, 1)


def sampled_logprobs(
    model: PolicyModel,
    packed: _Packed,
    bf16: bool,
    keep: float | None = None,
    counts: ReplayCounts | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probability_N, entropy_N) of the sampled tokens under ``model``, at the sampling temperature. ``keep``: how
    the engine's routes are replayed, see ``model.replay``; None: not at all. ``counts``: of them, added to."""
    replay = None
    if keep is not None and packed.routes_MLK is not None:
        replay = Replay(packed.routes_MLK, keep, counts or ReplayCounts())
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        x_BTD, _ = model.hidden(
            packed.ids_BT, replay
        )  # the last token predicts nothing, but whole blocks are faster
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1]).index_select(0, packed.at_N)
        head = model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
        return token_logprobs(x_ND, head, packed.target_N, packed.temperature)


@dataclass
class _Sums:
    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    weight: float = 0.0
    capped: float = 0.0
    same_version: int = 0
    parity_k3: float = 0.0
    parity_abs: float = 0.0
    drift_k3: float = 0.0
    lag: float = 0.0
    max_lag: int = 0

    def means(self) -> dict[str, float]:
        """Per token of the kind each is about, where there was one."""
        found: dict[str, float] = {}
        if self.tokens:
            found = {
                "entropy": self.entropy / self.tokens,
                "importance_weight": self.weight / self.tokens,
                "importance_capped": self.capped / self.tokens,
                "staleness_mean": self.lag / self.tokens,
                "staleness_max": float(self.max_lag),
            }
        if self.same_version:
            found["k3"] = self.parity_k3 / self.same_version
            found["logprob_gap"] = self.parity_abs / self.same_version
        if drifted := self.tokens - self.same_version:
            found["drift_k3"] = self.drift_k3 / drifted
        return found


def rl_step(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: RLStepConfig,
    version: int,
    *,
    bf16: bool,
    reference: PolicyModel | None = None,
    progress: float = 0.0,
) -> dict[str, float]:
    """One update of ``model``, whose weights are policy ``version``, when ``progress`` (0..1) of the run is over.
    Returns the step's metrics; a mean over no token is left out, not 0.

    Raises TrainingDiverged when the gradient is not finite: the weights are then untouched.
    """
    started = time.perf_counter()
    denominator = max(1, batch.rollouts) * config.tokens_per_rollout
    sums = _Sums()
    packed = pack(batch.samples, config.tokens_per_microbatch)
    keep = {"off": None, "pure": 0.0, "filtered": config.replay_keep}[config.router_replay]
    if keep is not None:
        _require_routes(batch.samples)
    counts = ReplayCounts()
    for p in packed:
        logp_N, entropy_N = sampled_logprobs(model, p, bf16, keep, counts)
        ratio_log_N = logp_N.detach() - p.behaviour_N
        weight_N = ratio_log_N.exp().clamp(max=config.importance_cap)
        advantage_N = p.advantage_N
        if reference is not None and config.kl_beta:
            with torch.no_grad():
                reference_N, _ = sampled_logprobs(reference, p, bf16)
            advantage_N = advantage_N - config.kl_beta * (logp_N.detach() - reference_N)
        loss = -(weight_N * advantage_N * logp_N).sum() / denominator
        loss.backward()
        _accumulate(sums, p, float(loss.detach()), entropy_N, weight_N, ratio_log_N, version, config)
    grad_norm = 0.0
    if packed:
        grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm))
        if not math.isfinite(grad_norm):
            optimizer.zero_grad(set_to_none=True)
            raise TrainingDiverged(
                f"the gradient norm of step {version} is {grad_norm}",
                "lower STAGE.step.lr, and add --restart-from STAGE",
            )
        for group in optimizer.param_groups:
            group["lr"] = config.lr * config.lr_scale(version, progress)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {
        "loss": sums.loss,
        "grad_norm": grad_norm,
        "lr_scale": config.lr_scale(version, progress),
        "trained_tokens": float(sums.tokens),
        "trained_samples": float(len(batch.samples)),
        "padded_tokens": float(sum(p.ids_BT.numel() for p in packed)),
        "parity_tokens": float(sums.same_version),
        **sums.means(),
        **counts.shares(),
        "broken_segments": float(batch.broken),
        "masked_overlong": float(batch.masked_overlong),
        "train_s": time.perf_counter() - started,
    }


def _require_routes(samples: Sequence[Sample]) -> None:
    """Invariant 3: of every token that is trained, or read by one that is."""
    for s in samples:
        last = int(np.flatnonzero(s.sampled_T)[-1])
        if s.routes_TLK is None or len(s.routes_TLK) < last or (s.routes_TLK[:last] == UNREAD).any():
            raise CadenzaError(
                "a sample has no routes for some token that is trained or read by one",
                "serve with an engine that records them, or set STAGE.step.router_replay to off "
                "with --restart-from STAGE",
            )


def _accumulate(
    sums: _Sums, packed: _Packed, loss: float, entropy_N: Tensor, weight_N: Tensor, ratio_log_N: Tensor,
    version: int, config: RLStepConfig,
) -> None:  # fmt: skip
    """k3 = (r - 1) - log r with r = trainer / engine (Schulman 2020), on segments of the trainer's own version
    alone (parity) and on others (drift), never mixed: a token sampled by the newest weights over keys that older
    ones cached drifts too."""
    k3_N = ratio_log_N.exp() - 1 - ratio_log_N
    lag_N = version - packed.version_N
    same_N = packed.oldest_N == version
    sums.tokens += len(lag_N)
    sums.loss += loss
    sums.entropy += float(entropy_N.sum())
    sums.weight += float(weight_N.sum())
    sums.capped += float((weight_N >= config.importance_cap).sum())
    sums.same_version += int(same_N.sum())
    sums.parity_k3 += float(k3_N[same_N].sum())
    sums.parity_abs += float(ratio_log_N[same_N].abs().sum())
    sums.drift_k3 += float(k3_N[~same_N].sum())
    sums.lag += float(lag_N.sum())
    sums.max_lag = max(sums.max_lag, int(lag_N.max()) if len(lag_N) else 0)
