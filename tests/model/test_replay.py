"""Router replay: the engine's experts where they are plausible, the trainer's own elsewhere, gradients in any case."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.core.types import UNREAD
from cadenza.model.config import ModelConfig
from cadenza.model.moe import MoE
from cadenza.model.replay import LayerReplay, Replay, ReplayCounts
from cadenza.model.transformer import PolicyModel

pytestmark = pytest.mark.needs_train
CONFIG = ModelConfig(
    vocab_size=37, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, n_experts=6, experts_per_token=2,
    d_expert=16, d_shared=16, max_positions=128,
)  # fmt: skip


def policy(seed: int = 0) -> PolicyModel:
    model = PolicyModel(CONFIG)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 if p.dim() >= 2 else torch.ones(p.shape))
    return model


def routes_of(model: PolicyModel, ids: torch.Tensor, replay: Replay | None = None) -> torch.Tensor:
    """(N, L, K): what each layer's router chose."""
    found: list[torch.Tensor] = []
    original = MoE.choose

    def choose(self, logits_NE, given=None):
        out = original(self, logits_NE, given)
        found.append(out[2])
        return out

    MoE.choose = choose  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with torch.no_grad():
            model.hidden(ids, replay)
    finally:
        MoE.choose = original
    return torch.stack(found, 1)


IDS = torch.randint(0, 37, (2, 64), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_replaying_the_own_routes_changes_a_bit(keep):
    model = policy()
    replay = Replay(routes_of(model, IDS), keep)
    with torch.no_grad():
        assert torch.equal(model.hidden(IDS)[0], model.hidden(IDS, replay)[0])
    unread = Replay(torch.full_like(replay.routes_NLK, UNREAD), keep)
    with torch.no_grad():
        assert torch.equal(model.hidden(IDS)[0], model.hidden(IDS, unread)[0])


def test_pure_replay_uses_other_experts_or_starves_the_router():
    model = policy()
    routes = routes_of(policy(9), IDS)
    replay = Replay(routes, 0.0)
    used = routes_of(model, IDS, replay)
    assert torch.equal(used.sort(-1).values, routes.sort(-1).values)
    model.hidden(IDS, replay)[0].square().sum().backward()
    for layer in model.layers:
        assert layer.mlp.gate.weight.grad.abs().sum() > 0  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue, reportOptionalMemberAccess]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]))
def test_an_implausible_expert_is_kept_or_one_is_used_twice(seed, k, keep):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(50, 6, generator=generator).mul(2).softmax(-1)
    own = probs.topk(k, -1).indices
    routes = torch.stack([torch.randperm(6, generator=generator)[:k] for _ in range(50)])
    routes[::7] = UNREAD
    counts = ReplayCounts()
    picked = LayerReplay(routes, keep, counts).pick(probs, own)
    refused = 0
    for n in range(50):
        chosen = picked[n].tolist()
        assert len(set(chosen)) == k
        if routes[n, 0] == UNREAD:
            assert chosen == own[n].tolist()
            continue
        least = float(probs[n, own[n, -1]])
        kept = {e for e in routes[n].tolist() if float(probs[n, e]) >= keep * least}
        assert kept <= set(chosen)
        refused += len(kept) < k
        refill = [e for e in own[n].tolist() if e not in kept][: k - len(kept)]
        assert set(chosen) == kept | set(refill)
    read = [n for n in range(50) if routes[n, 0] != UNREAD]
    differ = sum(set(routes[n].tolist()) != set(own[n].tolist()) for n in read)
    shares = {"routes_differ": differ / len(read), "routes_refused": refused / len(read)}
    assert counts.shares() == pytest.approx(shares) and ReplayCounts().shares() == {}


def test_the_fused_block_replays_otherwise_than_its_definition():
    model = policy()
    replay = Replay(routes_of(policy(3), IDS), 0.4)
    cos, sin = model.cos[:64].unsqueeze(0), model.sin[:64].unsqueeze(0)
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))
    for i, layer in enumerate(model.layers):
        a, _ = layer(x, cos, sin, replay.of_layer(i))
        b, _ = layer.composed(x, cos, sin, replay.of_layer(i))  # pyright: ignore[reportCallIssue]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_noise_that_moves_the_router_moves_the_log_probabilities_although_routes_are_replayed():
    """A perturbed router stands for an engine with other numerics: the tail of the gap has to shrink with replay."""
    model, noisy = policy(), policy()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in noisy.layers:
            gate = layer.mlp.gate.weight  # pyright: ignore[reportAttributeAccessIssue]
            gate.add_(torch.randn(gate.shape, generator=generator) * 0.02)  # pyright: ignore[reportArgumentType, reportCallIssue]
    ids = torch.randint(0, 37, (8, 128), generator=generator)
    routes = routes_of(noisy, ids)

    def logp(which, replay=None):
        with torch.no_grad():
            return which.logits(which.hidden(ids, replay)[0]).log_softmax(-1)

    engine = logp(noisy)
    gaps = {
        name: float((logp(model, replay) - engine).abs().quantile(0.99))
        for name, replay in (
            ("none", None), ("pure", Replay(routes, 0.0)), ("filtered", Replay(routes, 0.5))
        )
    }  # fmt: skip
    assert gaps["pure"] < 0.7 * gaps["none"] and gaps["filtered"] < 0.7 * gaps["none"], gaps
