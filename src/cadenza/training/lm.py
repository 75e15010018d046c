"""Next-token training, shared by base pretraining, continued pretraining and SFT.

One loop, read from top to bottom: take rows, compute the weighted loss, step, sometimes evaluate, sometimes save.
A batch is a list of microbatches of equal-length rows; weights say which targets count (0 for padding).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cadenza.core.errors import TrainingDiverged
from cadenza.model.logprobs import token_logprobs
from cadenza.model.transformer import PolicyModel
from cadenza.training.config import OptimizerConfig
from cadenza.training.optimizers import Optimizers

MIN_FILL = 0.7


@dataclass
class Rows:
    """One microbatch. ``ids_BT`` int64; ``weight_BT`` float32: position t weighs the prediction of ids[t] from
    ids[:t], so column 0 is unused."""

    ids_BT: Tensor
    weight_BT: Tensor


def pad_rows(sequences: list[tuple[np.ndarray, np.ndarray]], multiple: int = 64) -> Rows:
    """Right-pads (ids, weights) pairs to one length, a multiple of 64: every new shape costs the CPU kernels a
    compilation, and padding weighs nothing."""
    longest = max(len(ids) for ids, _ in sequences)
    t = -(-longest // multiple) * multiple
    ids_BT = torch.zeros(len(sequences), t, dtype=torch.int64)
    weight_BT = torch.zeros(len(sequences), t)
    for b, (ids, weight) in enumerate(sequences):
        ids_BT[b, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        weight_BT[b, : len(ids)] = torch.from_numpy(weight.astype(np.float32))
    return Rows(ids_BT, weight_BT)


def microbatches(sequences: list[tuple[np.ndarray, np.ndarray]], tokens_per_microbatch: int) -> list[Rows]:
    """Sorts by length and cuts into microbatches of at most ``tokens_per_microbatch`` padded tokens, in which no
    row is shorter than ``MIN_FILL`` of the longest."""
    out: list[Rows] = []
    pending: list[tuple[np.ndarray, np.ndarray]] = []
    for item in sorted(sequences, key=lambda s: -len(s[0])):
        longest = -(-len(pending[0][0] if pending else item[0]) // 64) * 64
        full = longest * (len(pending) + 1) > tokens_per_microbatch
        if pending and (full or len(item[0]) < MIN_FILL * longest):
            out.append(pad_rows(pending))
            pending = []
        pending.append(item)
    if pending:
        out.append(pad_rows(pending))
    return out


@dataclass
class Loss:
    """Of one microbatch. ``total``: what is minimized, summed over weighted targets. ``shown``: its part for the curve.
    ``balance``: of the router, see ``MoE.balance``."""

    total: Tensor
    shown: float
    balance: Tensor


def next_token_loss(model: PolicyModel, rows: Rows, bf16: bool, states: list[Tensor] | None = None) -> Loss:
    """The weighted negative log-likelihood; ``states`` gets the trunk's (B, T, D) appended."""
    nll, _, balance = weighted_nll(model, rows, bf16, states)
    return Loss(nll, float(nll.detach()), balance)


def weighted_nll(
    model: PolicyModel, rows: Rows, bf16: bool, states: list[Tensor] | None = None
) -> tuple[Tensor, float, Tensor]:
    """(sum of weight * negative log-likelihood, sum of weights, balance). Only weighted targets are scored."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        # The last token predicts nothing; it is fed all the same, because whole blocks of 64 are faster.
        x_BTD, balance = model.hidden(rows.ids_BT)
        if states is not None:
            states.append(x_BTD)
        b, t = rows.weight_BT[:, 1:].nonzero(as_tuple=True)
        head = model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
        logp_N, _ = token_logprobs(x_BTD[b, t], head, rows.ids_BT[b, t + 1])
    weight_N = rows.weight_BT[b, t + 1]
    return -(logp_N * weight_N).sum(), float(weight_N.sum()), balance


@torch.no_grad()
def mean_nll(model: PolicyModel, batches: list[Rows], bf16: bool) -> float:
    """Weighted mean negative log-likelihood in nats per token."""
    total, weights = 0.0, 0.0
    for rows in batches:
        nll, weight, _ = weighted_nll(model, rows, bf16)
        total, weights = total + float(nll), weights + weight
    return total / max(weights, 1e-9)


@torch.no_grad()
def nll_by_position(model: PolicyModel, batches: list[Rows], width: int, bf16: bool) -> list[float]:
    """Mean negative log-likelihood, nats, of the weighted targets in each ``width`` positions of a row: what more
    context is worth, and where a model stops understanding positions."""
    longest = max(rows.ids_BT.shape[1] for rows in batches)
    sums, counts = torch.zeros(2, -(-longest // width))
    for rows in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            x_BTD, _ = model.hidden(rows.ids_BT)
            b, t = rows.weight_BT[:, 1:].nonzero(as_tuple=True)
            head = model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
            logp_N, _ = token_logprobs(x_BTD[b, t], head, rows.ids_BT[b, t + 1])
        weight_N = rows.weight_BT[b, t + 1]
        sums.index_add_(0, (t + 1) // width, -logp_N * weight_N)
        counts.index_add_(0, (t + 1) // width, weight_N)
    return (sums / counts).tolist()


@dataclass
class LoopState:
    """Where a run of :func:`train` stands; saved and restored by the caller's ``save`` hook."""

    step: int = 0


def train(
    model: PolicyModel,
    optimizers: Optimizers,
    config: OptimizerConfig,
    batches: Callable[[int], list[Rows]],
    steps: int,
    state: LoopState,
    *,
    bf16: bool,
    on_step: Callable[[int, dict[str, float]], None],
    loss: Callable[[PolicyModel, Rows, bool], Loss] = next_token_loss,
    deadline_s: float = math.inf,
    used_s: float = 0.0,
) -> Iterator[int]:
    """Runs optimizer steps ``state.step`` .. ``steps`` - 1, yielding after each so that the caller can evaluate
    and save at the points it wants.

    ``batches(step)`` must depend on nothing but the step: that is what makes a resumed run see the same data.
    ``on_step`` gets nll (nats per weighted token, of what ``loss`` shows), grad_norm, tokens_per_s. Stops early, at a
    whole step, once ``deadline_s`` seconds have passed, of which a run that goes on has used ``used_s`` before.

    Raises TrainingDiverged when the gradient is not finite; the weights are those of the last good step.
    """
    started = time.monotonic() - used_s
    parameters = [p for p in model.parameters() if p.requires_grad]
    while state.step < steps and time.monotonic() - started < deadline_s:
        t0, tokens = time.monotonic(), 0
        rows = batches(state.step)
        total_weight = max(1e-9, sum(float(r.weight_BT[:, 1:].sum()) for r in rows))
        total_nll = 0.0
        for r in rows:
            parts = loss(model, r, bf16)
            (parts.total / total_weight + config.balance_weight * parts.balance / len(rows)).backward()
            total_nll += parts.shown
            tokens += r.ids_BT.numel()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm))
        if not math.isfinite(grad_norm):
            raise TrainingDiverged(
                f"the gradient norm of step {state.step} is {grad_norm}",
                "lower STAGE.optimizer.adam_lr and STAGE.optimizer.muon_lr, and add --restart-from STAGE",
            )
        # A run that its deadline will cut decays by the clock, or it would stop at a high rate.
        by_clock = steps * (t0 - started) / deadline_s
        optimizers.step(config.scale(max(state.step, int(by_clock)), steps))
        state.step += 1
        on_step(
            state.step,
            {
                "nll": total_nll / total_weight,
                "grad_norm": grad_norm,
                "tokens": float(tokens),
                "tokens_per_s": tokens / (time.monotonic() - t0),
            },
        )
        yield state.step
