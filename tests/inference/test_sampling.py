"""The sampler draws from the distribution it reports, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.inference.sampling import sample, uniforms

pytestmark = pytest.mark.needs_train


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_another_distribution(temperature):
    """Chi-square over 20,000 draws, seeded; the limit is the 99.9 % quantile of 11 degrees of freedom."""
    n, v = 20_000, 12
    logits = torch.randn(v, generator=torch.Generator().manual_seed(0)) * 1.5
    uniform = torch.from_numpy(uniforms(1234, n))
    ids, logp = sample(logits.expand(n, v), torch.full((n,), temperature), uniform)
    wanted = (logits / temperature).softmax(-1)
    counts = torch.bincount(ids, minlength=v).double()
    chi = float(((counts - n * wanted) ** 2 / (n * wanted)).sum())
    assert chi < 31.3
    torch.testing.assert_close(logp, wanted.log()[ids], rtol=1e-4, atol=1e-5)


def test_greedy_takes_another_id_or_reports_a_tempered_log_prob():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    ids, logp = sample(logits, torch.tensor([0.0, 0.0]), torch.tensor([0.99, 0.99]))
    assert ids.tolist() == [1, 0]
    torch.testing.assert_close(logp, logits.log_softmax(-1)[[0, 1], [1, 0]])


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 7))
def test_a_sample_depends_on_its_neighbours_in_the_batch(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 100, generator=generator)
    temperature = torch.rand(rows, generator=generator).sub(0.2).clamp(min=0)
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    ids, logp = sample(logits, temperature, uniform)
    for i in range(rows):
        one, one_logp = sample(logits[i : i + 1], temperature[i : i + 1], uniform[i : i + 1])
        assert one.tolist() == ids[i : i + 1].tolist()
        torch.testing.assert_close(one_logp, logp[i : i + 1])


@pytest.mark.parametrize("uniform", [0.0, float(np.nextafter(1.0, 0.0)), 1 - 2**-25])
def test_an_extreme_random_number_draws_an_impossible_id(uniform):
    logits = torch.full((1, 8), -1e9)
    logits[0, 3:5] = 0.0
    ids, logp = sample(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert ids.tolist() == [3 if uniform == 0 else 4] and float(logp) == pytest.approx(np.log(0.5))


def test_random_numbers_depend_on_anything_but_the_seed_and_the_index():
    assert uniforms(5, 3).tolist() == uniforms(5, 10)[:3].tolist()
    assert uniforms(5, 3).tolist() != uniforms(6, 3).tolist()
    assert (uniforms(-1, 100) < 1).all() and (uniforms(2**63, 100) >= 0).all()
