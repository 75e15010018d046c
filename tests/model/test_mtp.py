"""Multi-token prediction heads guess from what they may have seen, and come and go without touching the trunk."""

from __future__ import annotations

import pytest
import torch

from cadenza.model.config import ModelConfig
from cadenza.model.hf import load_model, save_model, with_mtp_heads
from cadenza.model.transformer import PolicyModel

pytestmark = pytest.mark.needs_train
CONFIG = ModelConfig(
    vocab_size=37, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, n_experts=4,
    d_expert=16, d_shared=16, max_positions=128, mtp_heads=3, d_mtp=24,
)  # fmt: skip


@pytest.fixture
def model() -> PolicyModel:
    model = PolicyModel(CONFIG)
    model.initialize(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    return model


@torch.no_grad()
def test_a_head_sees_tokens_it_has_to_guess(model):
    ids = torch.randint(0, 37, (1, 64), generator=torch.Generator().manual_seed(1))
    before = model.ahead(model.hidden(ids)[0], ids)
    assert [s.shape[1] for s in before] == [63, 62, 61]
    for place in (5, 40):
        changed = ids.clone()
        changed[0, place] = (changed[0, place] + 1) % 37
        after = model.ahead(model.hidden(changed)[0], changed)
        for k, (a, b) in enumerate(zip(before, after, strict=True), 1):
            moved = (a != b).any(-1)[0].nonzero().flatten()
            assert int(moved.min()) == place - k  # it has seen ids[t + k], and nothing after it


def test_heads_are_lost_on_the_way_through_a_directory(model, tmp_path):
    save_model(model, tmp_path, eos_token_id=1, bos_token_id=0)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


def test_fresh_heads_change_the_trunk_or_are_the_old_ones(model):
    grown = with_mtp_heads(model, 2, 40, seed=3)
    assert grown.config.mtp_heads == 2 and grown.mtp[0].ffn_out.weight.shape == (32, 40)  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in model.state_dict().items():
        if not name.startswith("mtp."):
            assert torch.equal(value, grown.state_dict()[name])
    assert not torch.equal(grown.mtp[0].join.weight, model.mtp[0].join.weight)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    assert torch.equal(grown.mtp[1].join.weight, with_mtp_heads(model, 2, 40, seed=3).mtp[1].join.weight)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
