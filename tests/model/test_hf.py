"""Model directories: bit-exact round trips, Qwen3-MoE names, and typed errors for everything that is not a model."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cadenza.core.errors import CorruptArtifact, MissingArtifact, ResourceExhausted
from cadenza.model import hf
from cadenza.model.config import ModelConfig
from cadenza.model.hf import load_model, save_model
from cadenza.model.transformer import PolicyModel

pytestmark = pytest.mark.needs_train
SMALL = ModelConfig(
    vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, n_experts=3, d_expert=16,
    d_shared=24, short_conv=3, max_positions=64,
)  # fmt: skip


def saved(folder: Path, dtype: torch.dtype | None = None, **changes) -> PolicyModel:
    model = PolicyModel(SMALL.model_copy(update=changes))
    model.initialize(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    save_model(model, folder, eos_token_id=8, bos_token_id=1, dtype=dtype)
    return model


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("extensions", [True, False])
def test_a_round_trip_changes_a_bit(tmp_path, tied, extensions):
    changes = {"tie_embeddings": tied} | ({} if extensions else {"short_conv": 0, "d_shared": 0})
    model = saved(tmp_path, None, **changes)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, loaded.state_dict()[name]), name


def test_a_bf16_directory_read_in_bf16_is_rounded_twice(tmp_path):
    model = saved(tmp_path, torch.bfloat16)
    loaded = load_model(tmp_path, torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor.to(torch.bfloat16), loaded.state_dict()[name]), name
    assert loaded.cos.dtype == torch.float32, "rotary tables in bf16 ruin long positions"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_plain_model_has_other_names_than_qwen3_moe(tmp_path):
    saved(tmp_path, short_conv=0, d_shared=0)
    per_layer = {
        "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight",
        *(f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.experts.{e}.{n}_proj.weight" for e in range(3) for n in ("gate", "up", "down")),
    }  # fmt: skip
    wanted = {f"model.layers.{i}.{name}" for i in range(2) for name in per_layer}
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == wanted | {"model.embed_tokens.weight", "model.norm.weight"}
    assert tensors["model.layers.0.mlp.experts.2.down_proj.weight"].shape == (
        32,
        16,
    )  # (out, in), as nn.Linear's
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen3MoeForCausalLM"], "qwen3_moe")


def test_an_extended_model_passes_for_qwen3_moe(tmp_path):
    saved(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "cadenza_moe"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_a_stack_trace(tmp_path, name):
    saved(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(MissingArtifact, match=name):
        load_model(tmp_path)


def damage_config(folder: Path, change) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(raw)))


def damage_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change({k: v.clone() for k, v in tensors.items()}), folder / "model.safetensors")


NORM, EXPERT = "model.norm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"
DAMAGES = {
    "empty weights": lambda d: (d / "model.safetensors").write_bytes(b""),
    "cut weights": lambda d: (d / "model.safetensors").write_bytes(
        (d / "model.safetensors").read_bytes()[:-100]
    ),
    "not json": lambda d: (d / "config.json").write_text("{"),
    "not text": lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"),
    "a list": lambda d: (d / "config.json").write_text("[]"),
    "no key": lambda d: damage_config(d, lambda c: {k: v for k, v in c.items() if k != "hidden_size"}),
    "null key": lambda d: damage_config(d, lambda c: {**c, "hidden_size": None}),
    "other width": lambda d: damage_config(d, lambda c: {**c, "hidden_size": 64}),
    "fewer experts": lambda d: damage_config(d, lambda c: {**c, "num_experts": 2}),
    "more layers": lambda d: damage_config(d, lambda c: {**c, "num_hidden_layers": 3}),
    "fewer layers": lambda d: damage_config(d, lambda c: {**c, "num_hidden_layers": 1}),
    "no tensor": lambda d: damage_weights(d, lambda t: {k: v for k, v in t.items() if k != NORM}),
    "no expert": lambda d: damage_weights(d, lambda t: {k: v for k, v in t.items() if k != EXPERT}),
    "a shape": lambda d: damage_weights(d, lambda t: {**t, NORM: torch.ones(31)}),
    "an expert's shape": lambda d: damage_weights(d, lambda t: {**t, EXPERT: torch.ones(16, 31)}),
    "no number": lambda d: damage_weights(d, lambda t: {**t, NORM: torch.full((32,), float("nan"))}),
    "infinity": lambda d: damage_weights(d, lambda t: {**t, NORM: torch.full((32,), float("inf"))}),
    "a stranger": lambda d: damage_weights(d, lambda t: {**t, "model.extra.weight": torch.ones(2)}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_loaded_or_a_stack_trace(tmp_path, damage):
    saved(tmp_path)
    DAMAGES[damage](tmp_path)
    with pytest.raises(CorruptArtifact) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in caught.value.cause and "\n" not in caught.value.cause


def test_a_kill_while_writing_leaves_half_a_model_under_its_name(tmp_path, monkeypatch):
    before = saved(tmp_path)

    def cut(_tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(hf, "save_file", cut)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path)
    loaded = load_model(tmp_path).state_dict()
    assert all(same_bits(v, loaded[k]) for k, v in before.state_dict().items())


def test_a_full_disk_is_a_stack_trace(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(ResourceExhausted):
            saved(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "model.safetensors").exists()
