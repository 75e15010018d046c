"""Muon's orthogonalization, who optimizes what, and the learning-rate schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples_made import policy

from cadenza.training.config import OptimizerConfig
from cadenza.training.optimizers import Muon, Optimizers, orthogonalize

pytestmark = pytest.mark.needs_train


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (3, 24, 16)])
def test_an_update_keeps_the_singular_values_of_the_gradient(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    out = orthogonalize(g)
    assert out.shape == g.shape and out.dtype == g.dtype
    singular = torch.linalg.svdvals(out)
    assert float(singular.min()) > 0.5 and float(singular.max()) < 1.4
    left, _, right = torch.linalg.svd(g, full_matrices=False)
    assert torch.nn.functional.cosine_similarity((left @ right).flatten(), out.flatten(), dim=0) > 0.95


def test_experts_are_orthogonalized_as_one_matrix_or_a_zero_gradient_is_nan():
    g = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    g[1] *= 1e3
    both = orthogonalize(g)
    torch.testing.assert_close(both[0], orthogonalize(g[0]), rtol=0.05, atol=0.05)
    assert torch.equal(orthogonalize(torch.zeros(4, 4)), torch.zeros(4, 4))


def muon_step(gradients: list[torch.Tensor], transposed: bool = False) -> list[torch.Tensor]:
    """What one step at rate 1 adds to parameters of zero."""
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()
    Muon(params, lr=1.0, transposed=params if transposed else ()).step()
    return [p.detach() for p in params]


def test_matrices_that_share_a_batch_share_an_update():
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(8, 24, generator=generator) * 10.0**i for i in range(3)]
    together = muon_step(gradients)
    for g, update in zip(gradients, together, strict=True):
        torch.testing.assert_close(update, muon_step([g])[0], rtol=0.05, atol=0.02)


def test_a_matrix_stored_in_out_is_stepped_at_another_rate_than_its_transpose():
    g = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    out_in = muon_step([g.T.contiguous()])[0]  # 32 outputs: its update is twice that of a square one
    torch.testing.assert_close(muon_step([g], transposed=True)[0], out_in.T, rtol=0.05, atol=0.02)


def names_of(optimizers: Optimizers, model) -> list[set[str]]:
    by_id = {id(p): n for n, p in model.named_parameters()}
    return [{by_id[id(p)] for g in part.param_groups for p in g["params"]} for part in optimizers.parts]


def test_a_parameter_has_no_optimizer_or_two():
    model = policy()
    adam, muon = names_of(Optimizers(model, 1e-3, 0.01, 0.0), model)
    assert adam | muon == set(dict(model.named_parameters())) and not adam & muon
    assert {"embed_tokens.weight", "norm.weight", "layers.0.mlp.gate.weight"} <= adam
    assert {"layers.0.mlp.w_in_EGD", "layers.1.self_attn.q_proj.weight"} <= muon
    assert names_of(Optimizers(model, 1e-3, 0.0, 0.0), model) == [adam | muon]


def test_a_restored_optimizer_takes_another_step():
    def stepped(model, optimizers, seed):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i))
        optimizers.step(0.5)

    a = policy()
    first = Optimizers(a, 1e-3, 0.01, 0.01)
    stepped(a, first, 1)
    b = policy()
    b.load_state_dict(a.state_dict())
    second = Optimizers(b, 1e-3, 0.01, 0.01)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # as from a file: nothing shared
    stepped(a, first, 2)
    stepped(b, second, 2)
    assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())
    assert all(p.grad is None for p in a.parameters())


@given(
    steps=st.integers(1, 300), warmup=st.integers(0, 50), decay=st.floats(0, 1), final=st.floats(0.01, 1.0)
)
def test_the_rate_leaves_its_bounds_or_rises_after_warm_up(steps, warmup, decay, final):
    config = OptimizerConfig(warmup_steps=warmup, decay_share=decay, final_lr_scale=final)
    scales = [config.scale(i, steps) for i in range(steps)]
    assert all(0 < s <= 1 for s in scales)
    after = scales[max(0, warmup - 1) :]
    assert all(a >= b for a, b in zip(after, after[1:], strict=False))
    assert all(s >= final - 1e-12 for s in after)


def test_the_rate_is_flat_between_warm_up_and_decay():
    config = OptimizerConfig(warmup_steps=10, decay_share=0.4, final_lr_scale=0.05)
    assert [config.scale(i, 100) for i in (0, 4, 9, 30, 60)] == pytest.approx([0.1, 0.5, 1, 1, 1])
    assert config.scale(80, 100) == pytest.approx(0.5) and config.scale(99, 100) == pytest.approx(0.05)
