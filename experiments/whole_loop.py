"""The claims of the whole loop: summaries against a sliding window, and what a price on length does.

    python experiments/whole_loop.py                     everything that is not done yet
    python experiments/whole_loop.py --list              what is done, what remains
    python experiments/whole_loop.py --only-arm rl_summary --seed 1
    python experiments/whole_loop.py --pool              only the figures, from what is done

An arm of a seed is done when docs/results/whole_loop/<arm>-seed<k>.json exists. Figures go to
docs/results/whole_loop.jsonl. Nothing here looks at held-out tasks before the arm `eval`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
from arms import Arm, Claim, Records, main_of

from cadenza.evaluation.figures import Figure, mean_over_seeds, points
from cadenza.evaluation.result import EvalResult
from cadenza.evaluation.statistics import (
    Outcomes,
    TaskValues,
    difference,
    estimate,
    paired_change,
    pass_at_k,
)

LONG = "heldout_hard"  # the split whose tasks need several contexts
EASY_SHARE = 1 / 3  # of the tasks, by how often SFT solves them: fixed before RL is looked at
MARGIN_POINTS = -5.0


class WholeLoop(Claim):
    """Summaries, trained and not, against a sliding window; length with and without a price."""

    name = "whole_loop"
    recipe = "proof-loop"
    arms = (
        Arm("prepare", ("tasks", "base", "cpt", "mtp", "long", "sft_summary", "sft_sliding")),
        Arm("rl_summary", ("rl_summary",), ("prepare",)),
        Arm("rl_sliding", ("rl_sliding",), ("prepare",)),
        Arm("rl_short", ("rl_short",), ("prepare",)),
        Arm("realtime", ("realtime",), ("prepare", "rl_summary")),
        Arm("eval", ("eval_*",), ("prepare", "rl_summary", "rl_sliding", "rl_short")),
    )

    def figures(self, records: Records) -> list[Figure]:
        seeds = [k for (arm, k) in records if arm == self.evaluated]
        results = {k: self._by_policy(records, k) for k in seeds}
        told = [*_deltas(records), *_stages(records)]
        return [*_summaries(results), *_length(results), *told] if seeds else told

    def _by_policy(self, records: Records, seed: int) -> dict[tuple[str, str], EvalResult]:
        """Sampled results of one seed by policy and suite. Policies with summaries and with a sliding window have
        different harnesses: that is what is compared, so the harness may differ here and nothing else."""
        folder = self.results / self.name / "evaluations"
        found = [EvalResult.load(folder / name) for name in records[self.evaluated, seed]["evaluations"]]
        return {(r.policy, r.suite): r for r in found if r.temperature > 0}


Results = dict[int, dict[tuple[str, str], EvalResult]]


def _outcomes(results: Results, policy: str, suite: str) -> list[Outcomes]:
    return [by[policy, suite].outcomes() for by in results.values() if (policy, suite) in by]


def _summaries(results: Results) -> list[Figure]:
    figures, seeds = [], list(results)
    for name, new, old in (
        ("summary_vs_window_points", "rl_summary", "rl_sliding"),
        ("summary_rl_vs_sft_points", "rl_summary", "sft_summary"),
    ):
        sides = _outcomes(results, new, LONG), _outcomes(results, old, LONG)
        if len(sides[0]) == len(sides[1]) == len(seeds):
            figures.append(points(name, paired_change(*sides), seeds=seeds))
    return figures


def _length(results: Results) -> list[Figure]:
    """By how much the price made answers shorter, on easy and on hard tasks, and what it cost."""
    seeds = list(results)
    suite = "heldout"
    parts = [_outcomes(results, policy, suite) for policy in ("sft_summary", "rl_summary", "rl_short")]
    if not all(len(part) == len(seeds) for part in parts):
        return []
    figures = []
    for name, chosen in (("easy", _easiest), ("hard", _hardest)):
        drops = [_drop(long, short, chosen(sft)) for sft, long, short in zip(*parts, strict=True)]
        drop = estimate(drops)
        figures.append(points(f"length_drop_{name}", drop, seeds=seeds, note="share of tokens, times 100"))
    change = paired_change(parts[2], parts[1])
    _, low, _ = change.points()
    met = "met" if low > MARGIN_POINTS else "missed"
    note = f"bar: lower bound above {MARGIN_POINTS:g}: {met}"
    return [*figures, points("length_pass1_change_points", change, seeds=seeds, note=note)]


def _drop(before: Outcomes, after: Outcomes, chosen: Callable[[str], bool]) -> TaskValues:
    """Per task, the share of its tokens that the price saved; NaN for tasks that are not chosen."""
    tokens = [TaskValues(o.task_ids, np.nanmean(o.tokens_NS, axis=1), (0.0, np.inf)) for o in (before, after)]
    saved = difference(tokens[0], tokens[1])
    row = {task: i for i, task in enumerate(before.task_ids)}
    base = np.array([tokens[0].values_N[row[task]] for task in saved.task_ids])
    kept = np.array([chosen(task) for task in saved.task_ids])
    return TaskValues(saved.task_ids, np.where(kept, saved.values_N / base, np.nan), (-np.inf, 1.0))


def _easiest(sft: Outcomes) -> Callable[[str], bool]:
    """The third of the tasks that SFT solves most often; ties by name, so that it is always the same third."""
    rates = pass_at_k(sft)
    order = sorted(zip(-np.nan_to_num(rates.values_N), rates.task_ids, strict=True))
    easy = {task for _, task in order[: round(EASY_SHARE * len(order))]}
    return easy.__contains__


def _hardest(sft: Outcomes) -> Callable[[str], bool]:
    easy = _easiest(sft)
    return lambda task: not easy(task)


def _deltas(records: Records) -> list[Figure]:
    """Size of a delta against the weights, decoding lost to a swap, and rollouts that met two versions: means over
    the steps of a run, then over seeds."""
    figures = []
    rl = {k: r["stages"]["rl_summary"] for (arm, k), r in records.items() if arm == "rl_summary"}
    for name, key, unit, better in (
        ("delta_vs_full", "delta_vs_full", "share", "lower"),
        ("swap_pause_steps", "swap_pause_steps", "decode steps", "lower"),
        ("rollouts_spanning_versions", "spans_versions", "share", "higher"),
    ):
        values = {k: stage[key] for k, stage in rl.items() if key in stage}
        if values:
            figures.append(mean_over_seeds(name, values, unit, better=better))
    return figures


def _stages(records: Records) -> list[Figure]:
    """What single stages have found out: perplexity far out in a row, and whether damaged weights were held back."""
    long = {k: r["stages"]["long"]["figures"] for (arm, k), r in records.items() if arm == "prepare"}
    rounds = {k: r["stages"]["realtime"]["figures"] for (arm, k), r in records.items() if arm == "realtime"}
    figures = []
    if long:
        ratios = {
            k: f["perplexity_after_quarter4"] / f["perplexity_unstretched_quarter4"] for k, f in long.items()
        }
        note = "perplexity in the last quarter of rows four times as long, after the phase against before"
        figures.append(mean_over_seeds("longctx_perplexity_ratio", ratios, "x", better="lower", note=note))
    if rounds:
        both = {k: float(f["damaged_refused"] and f["damaged_rolled_back"]) for k, f in rounds.items()}
        note = "refused by the gate, and taken back by the canary when it was let past"
        figures.append(mean_over_seeds("bad_checkpoint_refused", both, "share", note=note))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of the error, which is printed on one line."""
    return main_of(WholeLoop, __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
