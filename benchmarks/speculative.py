"""Speculative decoding with MTP heads against plain decoding: the same tokens, in how much less time.

    python benchmarks/speculative.py RUN... [--model rl] [--rollouts demonstrations] [--turns 60] [--draft 2] [--json]

RUN is the folder of a run, one a seed; MODEL the stage whose model has heads, ROLLOUTS the stage whose
``demonstrations.cdzr`` gives the contexts: one session at a time, as a user is served, samples the next turn of each.
Plain and speculative decoding take turns in one process; the ratio of their summed times is what to compare between
machines. Where a token differs, the two candidates' logits are looked at in one pass over the whole context. With
``--json`` it prints the figures of docs/results/speculative.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

from cadenza.evaluation.figures import Figure, line, mean_over_seeds, signed
from cadenza.inference.engine import Engine, torch_dtype
from cadenza.inference.requests import Completion, EngineConfig, Request, Sampling
from cadenza.model.hf import load_model
from cadenza.rollouts.record import read_rollouts
from cadenza.tokens import Tokenizer

MOST_TOKENS = 96


@dataclass(frozen=True)
class Turn:
    """A context that ends where the model would speak."""

    ids: tuple[int, ...]
    seed: int


def turns_of(path: Path, count: int) -> list[Turn]:
    """Turns spread over the rollouts and over their lengths, always the same."""
    found = [
        Turn(tuple(int(i) for i in s.ids_T[:start]), n)
        for n, rollout in enumerate(read_rollouts(path))
        for s in rollout.segments
        for start, _ in s.turns
    ]
    step = max(1, len(found) // count)
    return found[::step][:count]


def sample(engine: Engine, name: str, turn: Turn, temperature: float, stop: int) -> tuple[Completion, float]:
    """One turn, and the seconds from its first sampled token on (prompts are read alike)."""
    before = engine.counters["sampled"]
    engine.submit(
        Request(
            name,
            turn.ids,
            Sampling(temperature=temperature, max_tokens=MOST_TOKENS, stop_ids=(stop,)),
            turn.seed,
        )
    )
    done: list[Completion] = []
    while engine.counters["sampled"] == before:
        done = engine.step()
    begun = time.perf_counter()
    while not done:
        done = engine.step()
    spent = time.perf_counter() - begun
    engine.close(name)
    return done[0], spent


def top_gap(model: torch.nn.Module, ids: list[int], place: int) -> float:
    """Difference of the two largest logits for the token at ``place``."""
    with torch.no_grad():
        x, _ = model.hidden(torch.tensor([ids[:place]]))  # type: ignore[operator]
        top = model.logits(x[0, -1]).float().topk(2).values  # type: ignore[operator]
    return float(top[0] - top[1])


def compare(args: argparse.Namespace, model: Path, rollouts: Path, dtype: str, temperature: float) -> dict:
    """Both ways on every turn, ``repeats`` times."""
    turns = turns_of(rollouts, args.turns)
    stop = Tokenizer.load(model).id("<|end|>")
    engines = {
        draft: Engine(
            load_model(model),
            0,
            EngineConfig(slots=1, dtype=dtype, draft_tokens=draft, draft_rows=1),  # type: ignore[arg-type]
        )
        for draft in (0, args.draft)
    }
    checker = load_model(model, torch_dtype(dtype))
    seconds: dict[int, list[float]] = {0: [], args.draft: []}
    mismatches, gaps, tokens = 0, [], 0
    for repeat in range(args.repeats + 1):
        spent = dict.fromkeys(engines, 0.0)
        for n, turn in enumerate(turns):
            said = {}
            for draft, engine in engines.items():
                said[draft], taken = sample(engine, f"{repeat}/{n}", turn, temperature, stop)
                spent[draft] += taken
            if repeat:
                continue
            plain, guessed = said[0].ids, said[args.draft].ids
            tokens += len(plain)
            if plain != guessed:
                mismatches += 1
                same = next(i for i, (a, b) in enumerate(zip(plain, guessed, strict=False)) if a != b)
                gaps.append(top_gap(checker, [*turn.ids, *plain[: same + 1]], len(turn.ids) + same))
        if repeat:  # the first round compiles kernels
            for draft, value in spent.items():
                seconds[draft].append(value)
    counters = engines[args.draft].counters
    accepted = [counters[f"held_{k}"] / max(1, counters[f"guessed_{k}"]) for k in range(1, args.draft + 1)]
    return {
        "dtype": str(torch_dtype(dtype)).removeprefix("torch."),
        "temperature": temperature,
        "turns": len(turns),
        "tokens": tokens,
        "speedup": statistics.median(a / b for a, b in zip(seconds[0], seconds[args.draft], strict=True)),
        "accepted_by_position": accepted,
        "turns_that_differ": mismatches,
        "largest_gap_of_a_difference": max(gaps, default=0.0),
    }


SERVED = 0.6  # the temperature whose acceptance and speed are the figures


def figures_of(found: dict[int, list[dict]]) -> list[Figure]:
    """``found``: the rows of each seed's run."""
    served = {
        k: next(r for r in rows if r["dtype"] != "float32" and r["temperature"] == SERVED)
        for k, rows in found.items()
    }
    others = {k: [r for r in rows if r is not served[k]] for k, rows in found.items()}

    def told(key: str) -> str:
        return "; ".join(
            f"{r['dtype']} at {r['temperature']:g}: {sum(rs[i][key] for rs in others.values()) / len(others):.3g}"
            for i, r in enumerate(next(iter(others.values())))
        )

    first = {k: r["accepted_by_position"] for k, r in served.items()}
    later = ", ".join(
        f"guess {i + 1}: {sum(shares[i] for shares in first.values()) / len(first):.3g}"
        for i in range(1, len(next(iter(first.values()))))
    )
    exact = {k: [r for r in rows if r["dtype"] == "float32"] for k, rows in found.items()}
    rough = {k: [r for r in rows if r["dtype"] != "float32"] for k, rows in found.items()}
    turns = sum(r["turns"] for rows in exact.values() for r in rows)
    what = f"{next(iter(served.values()))['dtype']}, temperature {SERVED:g}"
    return [
        mean_over_seeds(
            "mtp_acceptance", {k: shares[0] for k, shares in first.items()}, "share",
            note=f"first guess, {what}; {later}",
        ),
        mean_over_seeds(
            "mtp_speedup", {k: r["speedup"] for k, r in served.items()}, "x", note=f"{what}; {told('speedup')}"
        ).model_copy(update={"peer": "plain decoding, the same engine", "peer_value": 1.0}),
        mean_over_seeds(
            "mtp_mismatch_fp32", {k: sum(r["turns_that_differ"] for r in rows) for k, rows in exact.items()}, "turns",
            better="lower", n=turns, note="turns that differ from plain decoding, at three temperatures",
        ),
        mean_over_seeds(
            "mtp_mismatch_gap", {k: max(r["largest_gap_of_a_difference"] for r in rows) for k, rows in rough.items()},
            "logits", better="lower", n=turns,
            note="largest difference of the two likeliest logits where a token differs, "
            f"{sum(r['turns_that_differ'] for rows in rough.values() for r in rows)} turns do",
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--model", default="rl", help="stage whose model is measured")
    parser.add_argument(
        "--rollouts", default="demonstrations", help="stage whose demonstrations give contexts"
    )
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--draft", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for run in args.runs:
        rollouts = run / args.rollouts / "demonstrations.cdzr"
        seed = int(tomllib.loads((run / "recipe.toml").read_text())["seed"])
        found[seed] = [
            compare(args, run / args.model, rollouts, dtype, t)
            for dtype in ("float32", "auto")
            for t in (0.0, SERVED, 1.0)
        ]
    for figure in signed(figures_of(found)):
        print(
            line(figure)
            if args.json
            else f"{figure.figure:20} {figure.value:g} {figure.unit}  ({figure.note})"
        )


if __name__ == "__main__":
    main()
