"""A small random policy, and the definition the engine is held to: one forward pass over the whole sequence."""

from __future__ import annotations

import numpy as np
import torch

from cadenza.inference.engine import Engine
from cadenza.inference.requests import Completion, EngineConfig, Request, Sampling
from cadenza.model.config import ModelConfig
from cadenza.model.transformer import PolicyModel

VOCAB = 41


def policy(seed: int = 0, **changes) -> PolicyModel:
    config = ModelConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, n_experts=4,
        d_expert=16, d_shared=16, max_positions=256, short_conv=3,
    ).model_copy(update=changes)  # fmt: skip
    model = PolicyModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 0.5 if "conv" in name else 0.15
            p.copy_(
                torch.randn(p.shape, generator=generator) * scale if p.dim() >= 2 else torch.ones(p.shape)
            )
    return model


def engine(seed: int = 0, **changes) -> Engine:
    model = changes.pop("model", None) or policy(seed)
    settings = {"slots": 4, "max_context": 96, "dtype": "float32"} | changes
    return Engine(model, 0, EngineConfig.model_validate(settings))


def request(
    name: str, ids, *, max_tokens: int = 5, temperature: float = 1.0, seed: int = 0, stop=()
) -> Request:
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, stop_ids=tuple(stop))
    return Request(name, tuple(ids), sampling, seed)


def run(engine: Engine, limit: int = 2000) -> dict[str, Completion]:
    """Steps until nothing moves; the completions by session."""
    out: dict[str, Completion] = {}
    for _ in range(limit):
        if engine.idle:
            return out
        for completion in engine.step():
            assert completion.session not in out, "one request was answered twice"
            out[completion.session] = completion
    raise AssertionError("the engine does not come to rest")


@torch.no_grad()
def whole_logprobs(model: PolicyModel, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(T - 1, V) fp32: row t is the distribution of ids[t + 1]."""
    x_BTD, _ = model.hidden(torch.tensor([ids]))
    return (model.logits(x_BTD)[0, :-1].float() / temperature).log_softmax(-1)


@torch.no_grad()
def whole_routes(model: PolicyModel, ids: list[int]) -> np.ndarray:
    """(T, L, J): the experts of each token in each layer."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.post_attention_layernorm.register_forward_hook(  # pyright: ignore[reportAttributeAccessIssue]
            lambda _m, _i, out, mlp=layer.mlp: found.append(mlp.route(out.view(-1, out.shape[-1]))[2])  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        )
        for layer in model.layers
    ]
    x = model.embed_tokens(torch.tensor([ids]))
    cos, sin = model.cos[: len(ids)].unsqueeze(0), model.sin[: len(ids)].unsqueeze(0)
    for layer in model.layers:
        x, _ = layer.composed(x, cos, sin)  # pyright: ignore[reportCallIssue]
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()
