"""How far trainer and engine disagree about the same tokens, without and with router replay, under injected noise.

    python benchmarks/router_replay.py MODEL ROLLOUTS [--turns 80] [--noise 0 0.01 0.03] [--json]

An engine samples the next turn of contexts from ROLLOUTS (``demonstrations.cdzr``). Its router weights carry noise of
the given size, relative to their own spread: it stands for what other kernels, batch shapes or devices do to a router's
input. The trainer then scores the same tokens with the clean weights: without replay, with all of the engine's routes,
and with those it finds plausible. Reported is the 99th percentile of the absolute difference of log-probabilities.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from cadenza.core.machine import commit
from cadenza.core.types import UNREAD
from cadenza.evaluation.figures import machine
from cadenza.inference.engine import Engine
from cadenza.inference.requests import EngineConfig, Request, Sampling
from cadenza.model.hf import load_model
from cadenza.model.transformer import PolicyModel
from cadenza.rollouts.record import read_rollouts
from cadenza.tokens import Tokenizer
from cadenza.training.rl import Sample, pack, sampled_logprobs

MODES = {"none": None, "pure": 0.0, "filtered": 0.5}
MOST_TOKENS = 96


def contexts(path: Path, count: int) -> list[list[int]]:
    """Contexts that end where the model would speak, spread over the rollouts."""
    found = [
        s.ids_T[:start].tolist() for r in read_rollouts(path) for s in r.segments for start, _ in s.turns
    ]
    return found[:: max(1, len(found) // count)][:count]


def noisy(model: PolicyModel, scale: float, seed: int) -> PolicyModel:
    """The model with noise on its router weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.layers:
            gate = layer.mlp.gate.weight  # type: ignore[union-attr]
            gate.add_(torch.randn(gate.shape, generator=generator) * gate.std() * scale)  # type: ignore[operator, union-attr]
    return model


def sampled(args: argparse.Namespace, noise: float) -> list[Sample]:
    """What the engine samples at temperature 1, as the trainer would get it."""
    stop = Tokenizer.load(args.model).id("<|end|>")
    engine = Engine(
        noisy(load_model(args.model), noise, args.seed), 0, EngineConfig(slots=16, dtype=args.dtype)
    )
    asked = dict(enumerate(contexts(args.rollouts, args.turns)))
    for n, ids in asked.items():
        engine.submit(
            Request(str(n), tuple(ids), Sampling(max_tokens=MOST_TOKENS, stop_ids=(stop,)), args.seed + n)
        )
    out: list[Sample] = []
    while len(out) < len(asked):
        for done in engine.step():
            engine.close(done.session)
            ids = np.array([*asked[int(done.session)], *done.ids], np.int32)
            mask = np.arange(len(ids)) >= len(ids) - len(done.ids)
            assert done.routes_TLJ is not None
            routes = np.full((len(ids), *done.routes_TLJ.shape[1:]), UNREAD, np.uint8)
            routes[: len(done.routes_TLJ)] = done.routes_TLJ
            logprobs = np.array(done.logprobs, np.float32)
            out.append(Sample(ids, mask, logprobs, np.zeros(len(logprobs), np.int32), 1.0, 1.0, routes))
    return out


@torch.no_grad()
def gaps(model: PolicyModel, samples: list[Sample], keep: float | None, bf16: bool) -> np.ndarray:
    """Absolute differences of the log-probabilities of every sampled token."""
    found = []
    for packed in pack(samples, 4096):
        logp_N, _ = sampled_logprobs(model, packed, bf16, keep)
        found.append((logp_N - packed.behaviour_N).abs().numpy())
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--turns", type=int, default=80)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.01, 0.03])
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = load_model(args.model)
    bf16 = args.dtype != "float32" and torch.cpu._is_avx512_bf16_supported()
    rows = []
    for noise in args.noise:
        samples = sampled(args, noise)
        found = {name: gaps(model, samples, keep, bf16) for name, keep in MODES.items()}
        rows.append(
            {
                "noise": noise,
                "tokens": len(found["none"]),
                "p99": {name: float(np.quantile(values, 0.99)) for name, values in found.items()},
                "mean": {name: float(values.mean()) for name, values in found.items()},
            }
        )
    result = {
        "format_version": 1, "dtype": args.dtype, "seed": args.seed, "commit": commit(), "machine": machine(),
        "rows": rows,
    }  # fmt: skip
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for row in rows:
        told = ", ".join(f"{name} {value:.4f}" for name, value in row["p99"].items())
        print(f"noise {row['noise']:g}: 99th percentile of the gap {told} ({row['tokens']} tokens)")


if __name__ == "__main__":
    main()
