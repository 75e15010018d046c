"""How far trainer and engine disagree about the same tokens, without and with router replay, under injected noise.

    python benchmarks/router_replay.py RUN... [--model rl] [--rollouts demonstrations] [--noise 0.01 0 0.03] [--json]

RUN is the folder of a run, one a seed. An engine samples the next turn of contexts from the rollouts of a stage
(``demonstrations.cdzr``). Its router weights carry noise of the given size, relative to their own spread: it stands for
what other kernels, batch shapes or devices do to a router's input. The trainer scores the same tokens with the clean
weights: without replay, with all of the engine's routes, and with those it finds plausible. Reported is the 99th
percentile of the absolute difference of log-probabilities, at the first noise; the others are in the note. With
``--json`` it prints the figures of docs/results/router_replay.jsonl.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import numpy as np
import torch

from cadenza.core.types import UNREAD
from cadenza.evaluation.figures import Figure, line, mean_over_seeds, signed
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


def sampled(args: argparse.Namespace, model: Path, rollouts: Path, noise: float) -> list[Sample]:
    """What the engine samples at temperature 1, as the trainer would get it."""
    stop = Tokenizer.load(model).id("<|end|>")
    engine = Engine(noisy(load_model(model), noise, args.seed), 0, EngineConfig(slots=16, dtype=args.dtype))
    asked = dict(enumerate(contexts(rollouts, args.turns)))
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


def measure(args: argparse.Namespace, run: Path) -> dict[float, dict[str, float]]:
    """By noise and kind of replay, the 99th percentile of the gap."""
    model, bf16 = (
        load_model(run / args.model),
        args.dtype != "float32" and torch.cpu._is_avx512_bf16_supported(),
    )
    rollouts = run / args.rollouts / "demonstrations.cdzr"
    found = {}
    for noise in args.noise:
        samples = sampled(args, run / args.model, rollouts, noise)
        found[noise] = {
            name: float(np.quantile(gaps(model, samples, keep, bf16), 0.99)) for name, keep in MODES.items()
        }
    return found


def figures_of(found: dict[int, dict[float, dict[str, float]]], noises: list[float]) -> list[Figure]:
    """``found``: by seed, noise and kind of replay."""
    figures = []
    for mode in MODES:
        others = "; ".join(
            f"noise {noise:g}: {sum(by[noise][mode] for by in found.values()) / len(found):.3g}"
            for noise in noises[1:]
        )
        by_seed = {seed: by[noises[0]][mode] for seed, by in found.items()}
        note = f"noise {noises[0]:g}" + (f"; {others}" if others else "")
        figures.append(mean_over_seeds(f"replay_p99_{mode}", by_seed, "nats", better="lower", note=note))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--model", default="rl", help="stage whose model is measured")
    parser.add_argument(
        "--rollouts", default="demonstrations", help="stage whose demonstrations give contexts"
    )
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.01, 0.0, 0.03])
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {
        int(tomllib.loads((run / "recipe.toml").read_text())["seed"]): measure(args, run) for run in args.runs
    }
    for figure in signed(figures_of(found, args.noise)):
        print(
            line(figure)
            if args.json
            else f"{figure.figure:22} {figure.value:.4f} {figure.unit}  ({figure.note})"
        )


if __name__ == "__main__":
    main()
