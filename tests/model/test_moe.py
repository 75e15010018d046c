"""The grouped evaluation of the mixture of experts against a loop over tokens and experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.model.config import ModelConfig
from cadenza.model.moe import MoE

pytestmark = pytest.mark.needs_train


def made(seed: int, *, experts: int, k: int, d_shared: int, d: int = 16, f: int = 8) -> MoE:
    config = ModelConfig(
        d_model=d, n_experts=experts, experts_per_token=k, d_expert=f, d_shared=d_shared, n_layers=1
    )
    moe = MoE(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return moe


def by_loop(moe: MoE, x_ND: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert: the definition."""
    _, weights_NK, experts_NK = moe.route(x_ND)
    rows = []
    for x_D, weights_K, experts_K in zip(x_ND, weights_NK, experts_NK, strict=True):
        y_D = torch.zeros_like(x_D)
        for weight, e in zip(weights_K, experts_K.tolist(), strict=True):
            gate, up = (moe.w_in_EGD[e] @ x_D).chunk(2)
            y_D = y_D + weight * ((F.silu(gate) * up) @ moe.w_out_EFD[e])
        if moe.d_shared:
            gate, up = moe.shared_in(x_D).chunk(2)
            y_D = y_D + moe.shared_out(F.silu(gate) * up)
        rows.append(y_D)
    return torch.stack(rows)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.sampled_from([1, 2, 7, 63, 64, 65, 130]),
    experts=st.integers(1, 6),
    d_shared=st.sampled_from([0, 8]),
    bias=st.sampled_from([0.0, 50.0]),
    data=st.data(),
)
def test_the_grouped_order_and_the_loop_over_experts_disagree(seed, tokens, experts, d_shared, bias, data):
    k = data.draw(st.integers(1, experts))
    moe = made(seed, experts=experts, k=k, d_shared=d_shared)
    x_ND = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(seed + 1))
    x_ND[:, 0] = 1.0
    with torch.no_grad():
        moe.gate.weight[0, 0] += bias  # with 50 every token wants expert 0
        wanted = by_loop(moe, x_ND)
        grouped, _ = moe(x_ND)
    torch.testing.assert_close(grouped, wanted, rtol=2e-5, atol=2e-5)


def test_the_grouped_order_loses_a_gradient():
    moe = made(3, experts=4, k=2, d_shared=8)
    x = torch.randn(70, 16, generator=torch.Generator().manual_seed(4))
    direction = torch.randn(70, 16, generator=torch.Generator().manual_seed(5))
    grads = []
    for function in (lambda: moe(x)[0], lambda: by_loop(moe, x)):
        moe.zero_grad()
        (function() * direction).sum().backward()
        grads.append({n: p.grad.clone() for n, p in moe.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() == dict(moe.named_parameters()).keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-4, msg=name)


def test_balance_is_not_one_when_even_or_does_not_grow_with_imbalance():
    moe = made(0, experts=4, k=1, d_shared=0)
    x = torch.randn(400, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        moe.gate.weight.zero_()
        moe.gate.weight[:, :4] = torch.eye(4) * 1e-3  # a router without an opinion
    even = float(moe(x)[1].detach())
    with torch.no_grad():
        moe.gate.weight[0, 5] = 0.0
        x[:, 5] = 1.0
        moe.gate.weight[0, 5] = 30.0  # all to expert 0
    assert even == pytest.approx(1.0, abs=0.02)
    assert float(moe(x)[1].detach()) == pytest.approx(4.0, abs=0.01)
