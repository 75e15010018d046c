"""Speculative decoding with MTP heads against plain decoding: the same tokens, in how much less time.

    python experiments/speculative.py RUN... [--model rl] [--sft sft] [--turns 60] [--draft 2] [--json]

An arm of `experiments/whole_loop.py`, and a script for the runs at hand. RUN is the folder of a run, one a seed; MODEL
the stage whose model has heads, SFT the stage that trained them along.
Contexts come from that stage's demonstrations, of the tasks alone that it held out: one session at a time, as a user is
served, samples the next turn of each. Plain and speculative decoding take turns in one process; the ratio of their
summed times is what to compare between machines.

Where a token differs, one pass in fp32 over the whole context tells how near the tie was: for greedy decoding the
difference of the two tokens' logits, for a sampled token how far the random number lay from the edge between the two,
in probability.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

from cadenza.evaluation.figures import Figure, line, mean_over_seeds, signed
from cadenza.inference.engine import Engine, torch_dtype
from cadenza.inference.requests import Completion, EngineConfig, Request, Sampling
from cadenza.inference.sampling import uniforms
from cadenza.model.hf import load_model
from cadenza.model.transformer import PolicyModel
from cadenza.pipelines import plan_recipe
from cadenza.pipelines.stages import seed_of
from cadenza.rollouts.record import read_rollouts
from cadenza.tokens import Tokenizer
from cadenza.training.config import SftDataConfig
from cadenza.training.sft import held_tasks

MOST_TOKENS = 96
SERVED, SERVING = 0.6, "bfloat16"  # the temperature and dtype whose acceptance and speed are the figures


@dataclass(frozen=True)
class Turn:
    """A context that ends where the model would speak."""

    ids: tuple[int, ...]
    seed: int


def turns_of(run: Path, stage: str, count: int) -> list[Turn]:
    """Turns spread over the rollouts that SFT has validated on, and over their lengths; always the same."""
    sft = next(s for s in plan_recipe(str(run / "recipe.toml"), []).stages if s.name == stage)
    rollouts = read_rollouts(run / str(sft.inputs["demonstrations"]) / "demonstrations.cdzr")
    data = SftDataConfig.model_validate(sft.settings["data"])
    held = held_tasks(rollouts, data, seed_of(sft.seed, "sft"))
    found = [
        Turn(tuple(int(i) for i in s.ids_T[:start]), n)
        for n, rollout in enumerate(rollouts)
        if rollout.task_id in held
        for s in rollout.segments
        for start, _ in s.turns
    ]
    step = max(1, len(found) // count)
    return found[::step][:count]


class Served:
    """An engine for one user at a time, and how long it decodes."""

    def __init__(self, model: Path, dtype: str, draft: int, stop: int) -> None:
        config = EngineConfig(slots=1, dtype=dtype, draft_tokens=draft, draft_rows=1)  # type: ignore[arg-type]
        self.engine, self.stop = Engine(load_model(model), 0, config), stop
        self.guess_s = 0.0
        if self.engine.drafter is not None:
            guess = self.engine.drafter.guess

            def timed(*args):
                begun = time.perf_counter()
                found = guess(*args)
                self.guess_s += time.perf_counter() - begun
                return found

            self.engine.drafter.guess = timed  # pyright: ignore[reportAttributeAccessIssue]

    def sample(self, name: str, turn: Turn, temperature: float) -> tuple[Completion, float]:
        """One turn, and the seconds after its first token is sampled; the guess that comes with that one included.
        Prompts are read alike."""
        engine = self.engine
        before, guessed_s = engine.counters["sampled"], self.guess_s
        sampling = Sampling(temperature=temperature, max_tokens=MOST_TOKENS, stop_ids=(self.stop,))
        engine.submit(Request(name, turn.ids, sampling, turn.seed))
        done: list[Completion] = []
        while engine.counters["sampled"] == before:
            done = engine.step()
        first_guess_s = self.guess_s - guessed_s
        begun = time.perf_counter()
        while not done:
            done = engine.step()
        spent = time.perf_counter() - begun
        engine.close(name)
        return done[0], first_guess_s + spent


@torch.no_grad()
def tie(
    model: PolicyModel, turn: Turn, said: tuple[int, ...], others: tuple[int, ...], temperature: float
) -> float:
    """How near the tie was where the two answers part: greedy, the difference of the two logits; else by how much
    probability the distribution would have to move for both to be drawn with the same number."""
    place = next(i for i, (a, b) in enumerate(zip(said, others, strict=False)) if a != b)
    x_BTD, _ = model.hidden(torch.tensor([[*turn.ids, *said[:place]]]))
    logits_V = model.logits(x_BTD[0, -1]).double()
    low, high = sorted((said[place], others[place]))
    if temperature == 0:
        return float((logits_V[low] - logits_V[high]).abs())
    cdf_V = (logits_V / temperature).softmax(-1).cumsum(-1)
    number = uniforms(turn.seed, MOST_TOKENS)[place]
    return float((number - cdf_V[low]).clamp(min=0) + (cdf_V[high - 1] - number).clamp(min=0))


@dataclass(frozen=True)
class Sizes:
    """``turns`` to sample, ``draft`` tokens guessed ahead, ``repeats`` of all turns that are timed."""

    turns: int = 60
    draft: int = 2
    repeats: int = 5


def measure(run: Path, model: str, sft: str, sizes: Sizes = Sizes()) -> list[dict]:
    """What was found of the model of a run, a row for each dtype and temperature. One thread: as a user is served."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = turns_of(run, sft, sizes.turns)
        return [
            compare(sizes, run / model, turns, dtype, temperature)
            for dtype in ("float32", SERVING)
            for temperature in (0.0, SERVED, 1.0)
        ]
    finally:
        torch.set_num_threads(threads)


def compare(sizes: Sizes, model: Path, turns: list[Turn], dtype: str, temperature: float) -> dict:
    """Both ways on every turn, ``repeats`` times."""
    stop = Tokenizer.load(model).id("<|end|>")
    served = {draft: Served(model, dtype, draft, stop) for draft in (0, sizes.draft)}
    checker = load_model(model, torch_dtype(dtype)).float()
    seconds: dict[int, list[float]] = {0: [], sizes.draft: []}
    ties, tokens = [], 0
    for repeat in range(sizes.repeats + 1):
        spent = dict.fromkeys(served, 0.0)
        for n, turn in enumerate(turns):
            said = {}
            for draft, one in served.items():
                said[draft], taken = one.sample(f"{repeat}/{n}", turn, temperature)
                spent[draft] += taken
            if repeat:
                continue
            tokens += len(said[0].ids)
            if said[0].ids != said[sizes.draft].ids:
                ties.append(tie(checker, turn, said[0].ids, said[sizes.draft].ids, temperature))
        if repeat:  # the first round compiles kernels
            for draft, value in spent.items():
                seconds[draft].append(value)
    counters = served[sizes.draft].engine.counters
    accepted = [counters[f"held_{k}"] / max(1, counters[f"guessed_{k}"]) for k in range(1, sizes.draft + 1)]
    return {
        "dtype": dtype,
        "temperature": temperature,
        "turns": len(turns),
        "tokens": tokens,
        "speedup": statistics.median(a / b for a, b in zip(seconds[0], seconds[sizes.draft], strict=True)),
        "accepted_by_position": accepted,
        "turns_that_differ": len(ties),
        "widest_tie": max(ties, default=0.0),
    }


def figures_of(found: dict[int, list[dict]]) -> list[Figure]:
    """``found``: the rows of each seed's run."""
    served = {
        k: next(r for r in rows if r["dtype"] == SERVING and r["temperature"] == SERVED)
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
    greedy = {k: [r for r in rows if r["temperature"] == 0] for k, rows in rough.items()}
    drawn = [r for rows in rough.values() for r in rows if r["temperature"] > 0]
    turns = sum(r["turns"] for rows in exact.values() for r in rows)
    what = f"{SERVING}, temperature {SERVED:g}"
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
            "mtp_mismatch_gap", {k: max(r["widest_tie"] for r in rows) for k, rows in greedy.items()}, "logits",
            better="lower", n=sum(r["turns"] for rows in greedy.values() for r in rows),
            note=f"{SERVING}, greedy: widest gap of the two tokens, in fp32, where a turn differs: "
            f"{sum(r['turns_that_differ'] for rows in greedy.values() for r in rows)} do; sampled: "
            f"{sum(r['turns_that_differ'] for r in drawn)} of {sum(r['turns'] for r in drawn)} turns differ, by "
            f"at most {max(r['widest_tie'] for r in drawn):.3g} of probability",
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--model", default="rl", help="stage whose model is measured")
    parser.add_argument("--sft", default="sft", help="stage whose held-out demonstrations give contexts")
    for name, default in dataclasses.asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sizes = Sizes(args.turns, args.draft, args.repeats)
    found = {
        int(tomllib.loads((run / "recipe.toml").read_text())["seed"]): measure(
            run, args.model, args.sft, sizes
        )
        for run in args.runs
    }
    for figure in signed(figures_of(found)):
        print(
            line(figure)
            if args.json
            else f"{figure.figure:20} {figure.value:g} {figure.unit}  ({figure.note})"
        )


if __name__ == "__main__":
    main()
