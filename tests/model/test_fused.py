"""The fused block against its definition as tensor operations: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.model import fused
from cadenza.model.config import ModelConfig
from cadenza.model.transformer import Block, PolicyModel, rotary_table

pytestmark = pytest.mark.needs_train


def made(seed: int, **changes) -> tuple[Block, torch.Tensor, torch.Tensor]:
    config = ModelConfig(
        vocab_size=41, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, n_experts=4, d_expert=16,
        d_shared=16, max_positions=512, short_conv=3,
    ).model_copy(update=changes)  # fmt: skip
    block = Block(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (1.0 if p.dim() == 1 else 0.0))
    return block, *rotary_table(config)


def outcome(block: Block, forward, x_BTD, direction_BTD) -> dict[str, torch.Tensor]:
    """Output, balance and gradients of a scalar that weighs them all."""
    block.zero_grad()
    x = x_BTD.clone().requires_grad_()
    y, balance = forward(x)
    ((y * direction_BTD).sum() + 3.0 * balance).backward()
    grads = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "balance": balance.detach(), "x": x.grad, **grads}


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    length=st.sampled_from([1, 2, 7, 127, 128, 129, 300]),
    taps=st.sampled_from([0, 2, 4]),
    kv_heads=st.sampled_from([1, 2, 4]),
    experts=st.sampled_from([1, 4]),
    d_shared=st.sampled_from([0, 16]),
    threads=st.sampled_from([1, 2]),
)
def test_the_fused_block_and_its_definition_disagree(
    seed, rows, length, taps, kv_heads, experts, d_shared, threads
):
    block, cos, sin = made(
        seed, short_conv=taps, n_kv_heads=kv_heads, n_experts=experts, experts_per_token=min(2, experts),
        d_shared=d_shared,
    )  # fmt: skip
    cos, sin = cos[:length], sin[:length]
    generator = torch.Generator().manual_seed(seed + 1)
    x, direction = torch.randn(2, rows, length, 32, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = outcome(block, lambda x: fused.block_forward(block, x, cos, sin), x, direction)
    finally:
        torch.set_num_threads(before)
    wanted = outcome(block, lambda x: block.composed(x, cos[None], sin[None]), x, direction)
    assert got.keys() == wanted.keys() == {"y", "balance", "x", *dict(block.named_parameters())}
    for name, value in wanted.items():
        scale = float(value.abs().max()) + 1e-3
        torch.testing.assert_close(got[name] / scale, value / scale, rtol=0, atol=3e-5, msg=name)


def test_bfloat16_rounds_the_fused_block_more_than_its_definition():
    """Against fp32, both under autocast: the fused one, which rounds less often, may not be further away."""
    block, cos, sin = made(5)
    cos, sin = cos[:200], sin[:200]
    generator = torch.Generator().manual_seed(6)
    x, direction = torch.randn(2, 4, 200, 32, generator=generator)
    exact = outcome(block, lambda x: block.composed(x, cos[None], sin[None]), x, direction)

    def error(forward) -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16):
            got = outcome(block, forward, x, direction)
        return {n: float((got[n] - v).norm() / (v.norm() + 1e-6)) for n, v in exact.items()}

    fused_errors = error(lambda x: fused.block_forward(block, x, cos, sin))
    composed_errors = error(lambda x: block.composed(x, cos[None], sin[None]))
    for name, value in fused_errors.items():
        assert value < 1.5 * composed_errors[name] + 0.01, (name, value, composed_errors[name])


def test_a_model_on_the_cpu_runs_the_definition(monkeypatch):
    model = PolicyModel(
        ModelConfig(vocab_size=41, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8)
    )
    model.initialize(0)
    called = []
    original = fused.block_forward
    monkeypatch.setattr(fused, "block_forward", lambda *a: called.append(1) or original(*a))
    model.hidden(torch.tensor([[1, 2, 3]]))
    assert len(called) == 2
