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
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from command import tell

from cadenza.core.errors import CadenzaError, ConfigError
from cadenza.evaluation.figures import Figure, mean_over_seeds, signed
from cadenza.inference.engine import Engine, torch_dtype
from cadenza.inference.requests import Completion, EngineConfig, Request, Sampling
from cadenza.inference.sampling import uniforms
from cadenza.model.hf import load_model
from cadenza.model.transformer import PolicyModel
from cadenza.pipelines import plan_recipe
from cadenza.pipelines.plan import PlannedStage, require_input
from cadenza.pipelines.stages import seed_of
from cadenza.rollouts.record import read_rollouts
from cadenza.tokens import Tokenizer
from cadenza.training.config import SftDataConfig
from cadenza.training.sft import held_tasks

MOST_TOKENS = 96
SERVED, SERVING = 0.6, "bfloat16"  # the temperature and dtype whose acceptance and speed are the figures
TEMPERATURES, DTYPES = (0.0, SERVED, 1.0), ("float32", SERVING)


@dataclass(frozen=True)
class Turn:
    """A context that ends where the model would speak."""

    ids: tuple[int, ...]
    seed: int


def turns_of(run: Path, sft: PlannedStage, count: int) -> list[Turn]:
    """Turns spread over the rollouts that SFT has validated on, and over their lengths; always the same.

    Raises ConfigError when the stage is no SFT, MissingArtifact when its demonstrations are not there.
    """
    source = sft.inputs.get("demonstrations")
    if source is None or "data" not in sft.settings:
        raise ConfigError(
            f"stage {sft.name!r} trains on no demonstrations", "name the SFT stage that trained the heads"
        )
    place = run / source if isinstance(source, str) else require_input(sft.name, "demonstrations", source)
    rollouts = read_rollouts(place / "demonstrations.cdzr")
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


def sft_of(run: Path, name: str) -> tuple[int, PlannedStage]:
    """The seed of a run at hand, and its SFT stage. Raises ConfigError when its recipe has no such stage."""
    path = run / "recipe.toml"
    plan = plan_recipe(str(path))
    found = [stage for stage in plan.stages if stage.name == name]
    if not found:
        raise ConfigError(
            f"{path} has no stage {name!r}; it holds the stages of the last command in that folder, no others",
            f"name another with --sft, of {', '.join(stage.name for stage in plan.stages)}, or give the folder its "
            "whole recipe again",
        )
    return plan.seed, found[0]


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

    def conditions(self) -> dict[str, Any]:
        """What must be alike in measurements that are pooled."""
        fixed = {"most_tokens": MOST_TOKENS, "served": [SERVING, SERVED]}
        return dataclasses.asdict(self) | fixed | {"temperatures": TEMPERATURES, "dtypes": DTYPES}


def measure(run: Path, model: str, sft: PlannedStage, sizes: Sizes = Sizes()) -> list[dict]:
    """What was found of the model of a run, a row for each dtype and temperature. One thread: as a user is served.

    ``sft``: of a plan that has it, which need not be the recipe in the run's folder: that holds the stages of the last
    command alone. Raises as ``turns_of``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = turns_of(run, sft, sizes.turns)
        return [
            compare(sizes, run / model, turns, dtype, temperature)
            for dtype in DTYPES
            for temperature in TEMPERATURES
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


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of the error, which is printed on one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--model", default="rl", help="stage whose model is measured")
    parser.add_argument("--sft", default="sft", help="stage whose held-out demonstrations give contexts")
    for name, default in dataclasses.asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    sizes = Sizes(args.turns, args.draft, args.repeats)
    try:
        stages = {run: sft_of(run, args.sft) for run in args.runs}
        found = {seed: measure(run, args.model, sft, sizes) for run, (seed, sft) in stages.items()}
    except CadenzaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    tell(signed(figures_of(found)), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
