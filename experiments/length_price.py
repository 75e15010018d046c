"""The claim of the length penalty: a price on length makes answers to easy tasks shorter, and costs no solved ones.

    python experiments/length_price.py                     everything that is not done yet
    python experiments/length_price.py --list              what is done, what remains
    python experiments/length_price.py --only-arm rl_short --seed 1
    python experiments/length_price.py --pool              only the figures, from what is done

An arm of a seed is done when docs/results/length_price/<arm>-seed<k>.json exists. Figures go to
docs/results/length_price.jsonl. Nothing here looks at held-out tasks but the arms `before` (SFT's rates, which say what
is easy) and `eval`; nothing is chosen by what they find.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np
from arms import Arm, Claim, Records
from command import main_of

from cadenza.evaluation.comparison import View
from cadenza.evaluation.figures import Figure, points
from cadenza.evaluation.statistics import Estimate, Outcomes, paired_change, pass_at_k, saved_shares

ALL = View("heldout", "Held-out tasks", ("heldout",), lambda _: True)
EASY_SHARE = 1 / 3  # of the tasks, by how often SFT solves them: fixed before RL is looked at
MARGIN_POINTS = -5.0


class LengthPrice(Claim):
    """The same RL from one SFT, with and without a price on length."""

    name = "length_price"
    recipe = "proof-length"
    arms = (
        Arm("prepare", ("tasks", "base", "cpt", "mtp", "long", "demonstrations", "sft")),
        # What is easy is said by SFT, before RL begins.
        Arm("before", ("eval_before",), ("prepare",)),
        Arm("rl", ("rl",), ("prepare",)),
        Arm("rl_short", ("rl_short",), ("prepare",)),
        Arm("eval", ("eval_long", "eval_short"), ("before", "rl", "rl_short")),
    )
    evaluated = ("before", "eval")

    def figures(self, records: Records) -> list[Figure]:
        """By how much the price made answers shorter, on easy and on hard tasks, and what it cost."""
        seeds = [k for (arm, k) in records if arm == "eval" and ("before", k) in records]
        if not seeds:
            return []
        results = self.results_of({key: r for key, r in records.items() if key[1] in seeds})
        sft, long, short = (
            list(results.by_seed(ALL, policy, greedy=False).values()) for policy in ("sft", "rl", "rl_short")
        )
        easy = [_easiest(o) for o in sft]
        hard = [set(o.task_ids) - chosen for o, chosen in zip(sft, easy, strict=True)]
        drops = saved_shares(long, short, {"easy": easy, "hard": hard})
        return [*_drops(drops, seeds), _cost(long, short, seeds)]


def _drops(drops: Mapping[str, Estimate], seeds: Sequence[int]) -> list[Figure]:
    note = "sampled tokens saved, in hundredths; of all tasks' tokens together"
    names = {
        "easy": "length_drop_easy",
        "hard": "length_drop_hard",
        "easy-hard": "length_drop_easy_over_hard",
    }
    by_seed = {name: ", ".join(f"{100 * v:.1f}" for v in drop.per_seed) for name, drop in drops.items()}
    return [
        points(names[name], drop, seeds=seeds, note=f"{note}; by seed {by_seed[name]}")
        for name, drop in drops.items()
    ]


def _cost(long: Sequence[Outcomes], short: Sequence[Outcomes], seeds: Sequence[int]) -> Figure:
    change = paired_change(short, long)
    _, low, _ = change.points()
    word = "met" if low > MARGIN_POINTS else "missed"
    rates = (", ".join(f"{np.nanmean(pass_at_k(o).values_N):.1%}" for o in side) for side in (short, long))
    note = f"bar: lower bound above {MARGIN_POINTS:g}: {word}; solved {' against '.join(rates)}"
    return points("length_pass1_change_points", change, seeds=seeds, note=note)


def _easiest(sft: Outcomes) -> set[str]:
    """The third of the tasks that SFT solves most often; ties by name, so that it is always the same third."""
    rates = pass_at_k(sft)
    order = sorted(zip(-np.nan_to_num(rates.values_N), rates.task_ids, strict=True))
    return {task for _, task in order[: round(EASY_SHARE * len(order))]}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of the error, which is printed on one line."""
    return main_of(LengthPrice, __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
