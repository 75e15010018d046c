"""How far trainer and engine disagree about the same tokens, without and with router replay, under injected noise.

    python experiments/router_replay.py RUN... [--model rl] [--rollouts demonstrations] [--noise 0.15 0 0.5] [--json]

An arm of `experiments/whole_loop.py`, and a script for the runs at hand. RUN is the folder of a run, one a seed. An
engine samples the next turn of contexts from the rollouts of a stage (``demonstrations.cdzr``). Its router weights
carry noise of the given size, relative to their own spread: it stands for what other kernels, batch shapes or devices
do to a router's input. The trainer scores the same tokens with the clean weights: without replay, with all of the
engine's routes, and with those it finds plausible. Reported is the 99th percentile of the absolute difference of
log-probabilities, at the first noise; the others are in the note. The first noise sends about every tenth token of a
layer to other experts, as often as was published of a large model with two engines (R3, arXiv:2510.11370). The note
also has what happens when some records are wrong (``--wrong``: the share of a layer's tokens whose recorded experts are
drawn at random), which is what a plausibility filter is for.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from command import tell

from cadenza.core.errors import CadenzaError
from cadenza.core.recipes import read_toml
from cadenza.core.types import UNREAD
from cadenza.evaluation.figures import Figure, mean_over_seeds, signed
from cadenza.inference.engine import Engine
from cadenza.inference.requests import EngineConfig, Request, Sampling
from cadenza.model.hf import load_model
from cadenza.model.replay import ReplayCounts
from cadenza.model.transformer import PolicyModel
from cadenza.rollouts.record import read_rollouts
from cadenza.tokens import Tokenizer
from cadenza.training.rl import Sample, pack, sampled_logprobs

MODES = {"none": None, "pure": 0.0, "filtered": 0.5}
MOST_TOKENS = 96


@dataclass(frozen=True)
class Conditions:
    """``turns`` to sample; ``noise`` on the router, the first for the figures; share of records that are ``wrong``;
    ``dtype`` of the engine; ``seed`` of the noise and of sampling."""

    turns: int = 1000
    noise: tuple[float, ...] = (0.15, 0.0, 0.5)
    wrong: float = 0.01
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    seed: int = 0

    def conditions(self) -> dict[str, Any]:
        """What must be alike in measurements that are pooled."""
        return dataclasses.asdict(self) | {"most_tokens": MOST_TOKENS, "modes": MODES}


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


def sampled(wanted: Conditions, model: Path, rollouts: Path, noise: float) -> list[Sample]:
    """What the engine samples at temperature 1, as the trainer would get it."""
    stop = Tokenizer.load(model).id("<|end|>")
    engine = Engine(
        noisy(load_model(model), noise, wanted.seed), 0, EngineConfig(slots=16, dtype=wanted.dtype)
    )
    asked = dict(enumerate(contexts(rollouts, wanted.turns)))
    for n, ids in asked.items():
        engine.submit(
            Request(str(n), tuple(ids), Sampling(max_tokens=MOST_TOKENS, stop_ids=(stop,)), wanted.seed + n)
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
def gaps(
    model: PolicyModel,
    samples: list[Sample],
    keep: float | None,
    bf16: bool,
    counts: ReplayCounts | None = None,
) -> np.ndarray:
    """Absolute differences of the log-probabilities of every sampled token. ``counts``: of the routes, added to."""
    found = []
    for packed in pack(samples, 4096):
        logp_N, _ = sampled_logprobs(model, packed, bf16, keep, counts)
        found.append((logp_N - packed.behaviour_N).abs().numpy())
    return np.concatenate(found)


def corrupted(samples: list[Sample], share: float, experts: int, seed: int) -> list[Sample]:
    """With the recorded experts of this share of (token, layer) drawn at random."""
    rng = np.random.default_rng(seed)
    out = []
    for s in samples:
        assert s.routes_TLK is not None
        routes = s.routes_TLK.copy()
        t, layers, k = routes.shape
        drawn = rng.random((t, layers, experts)).argsort(-1)[..., :k].astype(np.uint8)
        wrong = (rng.random((t, layers, 1)) < share) & (routes != UNREAD)
        out.append(dataclasses.replace(s, routes_TLK=np.where(wrong, drawn, routes)))
    return out


def measure(
    run: Path,
    name: str,
    rollouts_of: str,
    wanted: Conditions = Conditions(),
) -> dict[str, dict[str, float]]:
    """By condition and kind of replay, the 99th percentile of the gap, and ``other``: how often experts differ."""
    model = load_model(run / name)
    bf16 = wanted.dtype != "float32" and torch.cpu._is_avx512_bf16_supported()
    rollouts = run / rollouts_of / "demonstrations.cdzr"
    found: dict[str, dict[str, float]] = {}

    def look(condition: str, samples: list[Sample]) -> None:
        counts = {name: ReplayCounts() for name in MODES}
        found[condition] = {
            name: float(np.quantile(gaps(model, samples, keep, bf16, counts[name]), 0.99))
            for name, keep in MODES.items()
        } | {
            "other": counts["pure"].shares()["routes_differ"],
            "tokens": float(sum(s.sampled_T.sum() for s in samples)),
        }

    for noise in wanted.noise:
        samples = sampled(wanted, run / name, rollouts, noise)
        look(f"noise {noise:g}", samples)
        if noise == wanted.noise[0]:
            wrong = corrupted(samples, wanted.wrong, model.config.n_experts, wanted.seed)
            look(f"noise {noise:g} and {wanted.wrong:.0%} of the records wrong", wrong)
    return found


def figures_of(found: dict[int, dict[str, dict[str, float]]]) -> list[Figure]:
    """``found``: by seed, condition (the first is the figure's) and kind of replay."""
    first, *others = next(iter(found.values()))

    def mean(condition: str, key: str) -> float:
        return sum(by[condition][key] for by in found.values()) / len(found)

    tokens = int(sum(by[first]["tokens"] for by in found.values()))
    figures = []
    for mode in MODES:
        told = [f"{c}: {mean(c, mode):.3g} ({mean(c, 'other'):.1%})" for c in others]
        note = "; ".join([f"{first}, {mean(first, 'other'):.1%} of a layer's tokens differ", *told])
        by_seed = {seed: by[first][mode] for seed, by in found.items()}
        name = f"replay_p99_{mode}"
        figures.append(mean_over_seeds(name, by_seed, "nats", better="lower", n=tokens, note=note))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of the error, which is printed on one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--model", default="rl", help="stage whose model is measured")
    parser.add_argument(
        "--rollouts", default="demonstrations", help="stage whose demonstrations give contexts"
    )
    usual = Conditions()
    parser.add_argument("--turns", type=int, default=usual.turns)
    parser.add_argument("--noise", type=float, nargs="+", default=usual.noise)
    parser.add_argument("--wrong", type=float, default=usual.wrong)
    parser.add_argument("--dtype", default=usual.dtype, choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    wanted = Conditions(args.turns, tuple(args.noise), args.wrong, args.dtype, args.seed)
    try:
        seeds = {run: int(read_toml(run / "recipe.toml").get("seed", 0)) for run in args.runs}
        found = {seed: measure(run, args.model, args.rollouts, wanted) for run, seed in seeds.items()}
    except CadenzaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    tell(signed(figures_of(found)), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
