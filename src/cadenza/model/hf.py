"""Hugging Face model directories, in and out.

Tensor names are Qwen3-MoE's, one matrix per expert, so that a checkpoint without the convolution and the shared
expert is an ordinary Qwen3-MoE checkpoint; the extensions add ``short_conv``,
``mlp.shared_expert`` and ``mtp`` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cadenza.core.errors import CorruptArtifact, MissingArtifact
from cadenza.core.files import disk_full, is_disk_full
from cadenza.model.config import ModelConfig
from cadenza.model.transformer import PolicyModel

FORMAT_VERSION = 1


def to_hf_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our stacked parameters -> per-expert Hugging Face tensors."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix = "" if name.startswith("lm_head") else "model."
        if name.endswith("mlp.w_in_EGD"):
            base = prefix + name.removesuffix("w_in_EGD")
            for e, w in enumerate(tensor):
                gate, up = w.chunk(2, dim=0)
                out[f"{base}experts.{e}.gate_proj.weight"] = gate
                out[f"{base}experts.{e}.up_proj.weight"] = up
        elif name.endswith("mlp.w_out_EFD"):
            base = prefix + name.removesuffix("w_out_EFD")
            for e, w in enumerate(tensor):
                out[f"{base}experts.{e}.down_proj.weight"] = w.T
        elif name.endswith("mlp.shared_in.weight"):
            base = prefix + name.removesuffix("shared_in.weight")
            gate, up = tensor.chunk(2, dim=0)
            out[f"{base}shared_expert.gate_proj.weight"] = gate
            out[f"{base}shared_expert.up_proj.weight"] = up
        elif name.endswith("mlp.shared_out.weight"):
            out[prefix + name.replace("shared_out", "shared_expert.down_proj")] = tensor
        else:
            out[prefix + name.replace("short_conv.weight_DP", "short_conv.weight")] = tensor
    return {k: v.contiguous() for k, v in out.items()}


def from_hf_names(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of :func:`to_hf_names`. Raises KeyError naming the first tensor that is missing."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name or ".mlp.shared_expert." in name:
            continue
        ours = name.removeprefix("model.").replace("short_conv.weight", "short_conv.weight_DP")
        state[ours] = tensor
    for i in range(config.n_layers):
        base, ours = f"model.layers.{i}.mlp.", f"layers.{i}.mlp."
        experts = range(config.n_experts)
        state[ours + "w_in_EGD"] = torch.stack(
            [
                torch.cat(
                    [
                        tensors[f"{base}experts.{e}.gate_proj.weight"],
                        tensors[f"{base}experts.{e}.up_proj.weight"],
                    ]
                )
                for e in experts
            ]
        )
        state[ours + "w_out_EFD"] = torch.stack(
            [tensors[f"{base}experts.{e}.down_proj.weight"].T for e in experts]
        )
        if config.d_shared:
            shared = base + "shared_expert."
            state[ours + "shared_in.weight"] = torch.cat(
                [tensors[shared + "gate_proj.weight"], tensors[shared + "up_proj.weight"]]
            )
            state[ours + "shared_out.weight"] = tensors[shared + "down_proj.weight"]
    return state


def hf_config(config: ModelConfig, eos_token_id: int, bos_token_id: int) -> dict:
    """config.json in Qwen3-MoE's keys; our extensions under keys of their own."""
    plain = config.d_shared == 0 and config.short_conv == 0 and config.mtp_heads == 0
    return {
        "architectures": ["Qwen3MoeForCausalLM" if plain else "CadenzaMoeForCausalLM"],
        "model_type": "qwen3_moe" if plain else "cadenza_moe",
        "cadenza_format_version": FORMAT_VERSION,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.d_expert,
        "intermediate_size": config.d_expert,
        "shared_expert_intermediate_size": config.d_shared,
        "short_conv_taps": config.short_conv,
        "num_nextn_predict_layers": config.mtp_heads,
        "mtp_intermediate_size": config.d_mtp,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "dtype": "bfloat16",
    }


def config_from_hf(raw: dict) -> ModelConfig:
    """Reads config.json of this format or of Qwen3-MoE. Raises KeyError on a missing key."""
    rope = raw.get("rope_theta") or raw.get("rope_parameters", {}).get("rope_theta", 10_000.0)
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        d_model=raw["hidden_size"],
        n_layers=raw["num_hidden_layers"],
        n_heads=raw["num_attention_heads"],
        n_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        n_experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        d_expert=raw["moe_intermediate_size"],
        d_shared=raw.get("shared_expert_intermediate_size", 0),
        short_conv=raw.get("short_conv_taps", 0),
        mtp_heads=raw.get("num_nextn_predict_layers", 0),
        d_mtp=raw.get("mtp_intermediate_size", 256),
        rope_theta=rope,
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw["rms_norm_eps"],
        tie_embeddings=raw["tie_word_embeddings"],
    )


def with_mtp_heads(model: PolicyModel, heads: int, width: int, seed: int) -> PolicyModel:
    """The same policy with fresh MTP heads in the place of any it had."""
    grown = PolicyModel(model.config.model_copy(update={"mtp_heads": heads, "d_mtp": width}))
    grown.initialize(seed)
    trunk = {name: value for name, value in model.state_dict().items() if not name.startswith("mtp.")}
    grown.load_state_dict(trunk, strict=False)
    return grown


def take_heads(model: PolicyModel, source: PolicyModel) -> PolicyModel:
    """``model``'s trunk with ``source``'s MTP heads. Raises ValueError when there are none, or of another width."""
    c = source.config
    if not c.mtp_heads or c.d_model != model.config.d_model:
        raise ValueError("the model has no MTP heads of this width")
    grown = with_mtp_heads(model, c.mtp_heads, c.d_mtp, seed=0)
    grown.mtp.load_state_dict(source.mtp.state_dict())
    return grown


def with_longer_context(model: PolicyModel, positions: int, factor: float) -> PolicyModel:
    """The same weights for rows of ``positions`` tokens, the rotary base raised so that a head's slowest pair turns
    ``factor`` times more slowly and the fastest as before (NTK-aware scaling; bloc97 2023, and Peng et al. 2023,
    arXiv:2309.00071, section 3.1). Training has to follow."""
    c = model.config
    theta = c.rope_theta * factor ** (c.head_dim / (c.head_dim - 2))
    longer = PolicyModel(c.model_copy(update={"max_positions": positions, "rope_theta": theta}))
    longer.load_state_dict(model.state_dict())
    return longer


def save_model(
    model: PolicyModel,
    directory: Path,
    *,
    eos_token_id: int,
    bos_token_id: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes config.json, generation_config.json and model.safetensors (weights renamed into place last).

    ``dtype`` casts the weights (bf16 to ship); None keeps them as they are. Raises ResourceExhausted: disk full.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to(dtype or v.dtype) for k, v in model.state_dict().items()}
    config = hf_config(model.config, eos_token_id, bos_token_id)
    config["dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    partial = directory / "model.safetensors.partial"
    try:
        save_file(to_hf_names(state), partial, metadata={"format": "pt"})
    except SafetensorError as error:  # the library turns the system's error into text
        if is_disk_full(error):
            raise disk_full(partial) from error
        raise
    os.replace(partial, directory / "model.safetensors")


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """Reads a model directory into ``dtype`` parameters.

    Raises:
        MissingArtifact: the directory, config.json or the weights are not there.
        CorruptArtifact: they cannot be read, names and shapes do not fit the configuration, or some are no numbers.
    """
    for name in ("config.json", "model.safetensors"):
        if not (directory / name).is_file():
            raise MissingArtifact(
                f"no model in {directory}: {name} is missing", "name a directory that `cadenza train` wrote"
            )
    mend = "restore the directory from a copy, or train it again"
    try:
        config = config_from_hf(json.loads((directory / "config.json").read_text()))
        state = from_hf_names(load_file(directory / "model.safetensors"), config)
        model = PolicyModel(config)
        model.load_state_dict(state, strict=True)
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CorruptArtifact(f"the model in {directory} cannot be read ({reason})", mend) from error
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():  # it would answer with nothing, and that would count as not solved
            raise CorruptArtifact(f"the model in {directory} has weights that are no numbers ({name})", mend)
    for parameter in model.parameters():  # not Module.to: the rotary tables stay in fp32
        parameter.data = parameter.data.to(dtype)
    return model
