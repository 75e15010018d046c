"""Self-distillation of MTP heads against its definition, and what it must leave alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples_made import policy

from cadenza.model.hf import with_mtp_heads
from cadenza.training.config import OptimizerConfig
from cadenza.training.lm import LoopState, microbatches, next_token_loss, train
from cadenza.training.mtp import JointLoss, agreement, divergence, frozen_trunk_loss
from cadenza.training.optimizers import Optimizers

pytestmark = pytest.mark.needs_train


def rows(seed: int = 0, count: int = 4, length: int = 50, vocab: int = 20):
    """Sequences that repeat a short pattern, so that there is something to foresee."""
    random = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        pattern = random.integers(0, vocab, 5)
        ids = np.tile(pattern, length)[:length].astype(np.int32)
        out.append((ids, np.ones(length, np.float32)))
    return out


def grown(heads: int = 2):
    return with_mtp_heads(policy(), heads, 32, seed=1)


def test_the_divergence_differs_from_its_definition_position_by_position():
    model = grown()
    (batch,) = microbatches(rows(), 10_000)
    batch.weight_BT[1, 10:30] = 0.0
    batch.weight_BT[2, 5] = 0.5
    with torch.no_grad():
        x, _ = model.hidden(batch.ids_BT)
        got = float(divergence(model, x, batch))
        wanted = 0.0
        states = model.ahead(x, batch.ids_BT)
        for b in range(4):
            for k in (1, 2):
                for target in range(k + 1, 64):
                    trunk = model.logits(x[b, target - 1]).log_softmax(-1)
                    head = model.logits(states[k - 1][b, target - k - 1]).log_softmax(-1)
                    kl = F.kl_div(head, trunk, log_target=True, reduction="sum")
                    wanted += float(batch.weight_BT[b, target] * kl) / 2
    assert got == pytest.approx(wanted, rel=1e-4)
    assert not math.isclose(float(divergence(model, x, batch, 3).detach()), got, rel_tol=1e-6)


def test_an_estimate_of_the_divergence_is_biased_or_cannot_be_repeated():
    model = grown()
    with torch.no_grad():
        whole, estimated = 0.0, 0.0
        for seed in range(40):
            (batch,) = microbatches(rows(seed), 10_000)
            x, _ = model.hidden(batch.ids_BT)
            whole += float(divergence(model, x, batch))
            estimated += (one := float(divergence(model, x, batch, 4)))
            assert one == float(divergence(model, x, batch, 4))
    assert estimated == pytest.approx(whole, rel=0.05)


def test_the_trunk_moves_while_only_heads_are_trained_or_they_learn_nothing():
    model = grown()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("mtp."))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    losses: list[float] = []
    config = OptimizerConfig(adam_lr=3e-3, muon_lr=0.01, warmup_steps=2)
    optimizers = Optimizers(model, config.adam_lr, config.muon_lr, 0.01)
    for _ in train(
        model, optimizers, config, lambda step: microbatches(rows(step), 10_000), 40, LoopState(), bf16=False,
        on_step=lambda _step, values: losses.append(values["nll"]), loss=frozen_trunk_loss,
    ):  # fmt: skip
        pass
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != name.startswith("mtp.") or name.endswith("norm.weight")


def test_the_joint_loss_shows_another_next_token_loss_or_leaves_the_trunk_out():
    model = grown()
    (batch,) = microbatches(rows(), 10_000)
    plain = next_token_loss(model, batch, False)
    joint = JointLoss(0.5)(model, batch, False)
    assert joint.shown == pytest.approx(plain.shown, rel=1e-6)
    assert float(joint.total.detach()) > float(plain.total.detach())
    (joint.total - plain.total).backward()
    assert model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0  # through the states, not the teacher  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue, reportOptionalMemberAccess]
    assert model.mtp[1].join.weight.grad.abs().sum() > 0  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue, reportOptionalMemberAccess]


def test_agreement_is_not_that_of_greedy_tokens():
    model = grown()
    batches = microbatches(rows(), 10_000)
    shares = agreement(model, batches, False)
    assert len(shares) == 2 and all(0.0 <= share <= 1.0 for share in shares)
    with torch.no_grad():
        for (
            head
        ) in model.mtp:  # a head that hands on the trunk's state agrees wherever the next token repeats
            head.join.weight.zero_()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            head.ffn_out.weight.zero_()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    x, _ = model.hidden(batches[0].ids_BT)
    own = model.logits(x).argmax(-1)
    counted = batches[0].weight_BT[:, 2:] > 0
    wanted = float(((own[:, 1:-1] == own[:, :-2]) & counted).sum() / counted.sum())
    assert agreement(model, batches, False)[0] == pytest.approx(wanted, abs=0.02)
