"""The claims of the first loop: RL improves the agent over SFT, and over SFT continued for the same wall time.

    python experiments/first_loop.py                     everything that is not done yet (about 90 minutes a seed)
    python experiments/first_loop.py --list              what is done, what remains
    python experiments/first_loop.py --only-arm rl --seed 1
    python experiments/first_loop.py --pool              only the figures, from what is done
    python experiments/first_loop.py --restart --seed 1  seed 1 from the beginning; with --only-arm from that arm on

An arm of a seed is done when docs/results/first_loop/<arm>-seed<k>.json exists; it is written the moment the arm
ends, so that each can be committed and the rest run another day. Its curves lie beside it in <arm>-seed<k>/. Figures
go to docs/results/first_loop.jsonl.
Nothing here looks at held-out tasks before the arm `eval`, and temperatures are chosen on validation tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from arms import Arm, Claim, Records
from command import main_of
from curves import pace

from cadenza.evaluation.comparison import VIEWS, View
from cadenza.evaluation.figures import Figure, mean_over_seeds, points
from cadenza.evaluation.statistics import Estimate

BUDGET_KEY = "sft_continued.budget_s"  # the wall time that RL took, so that both arms had the same
LEAST_TASKS = 200  # of the main view: with fewer the claim is not tested
BARS = {"rl_gain_points": 8.0, "greedy_change_points": -5.0, "best8_change_points": -5.0}


class FirstLoop(Claim):
    """RL against SFT, SFT continued and synchronous RL."""

    name = "first_loop"
    recipe = "proof"
    arms = (
        Arm("prepare", ("tasks", "base", "cpt", "sft")),
        Arm("rl", ("rl",), ("prepare",)),
        Arm("sft_continued", ("sft_continued",), ("prepare", "rl")),
        # One stage a thread split (rl_sync_1x1, rl_sync_2x2, ...): the fastest is what async is compared with.
        Arm("rl_sync", ("rl_sync_*",), ("prepare",)),
        Arm("eval", ("eval",), ("prepare", "rl", "sft_continued")),
    )

    def overrides_for(self, seed: int) -> list[str]:
        """The budget of `sft_continued`, once RL has set it."""
        rl = self.record("rl", seed)
        return [f"{BUDGET_KEY}={rl['stages']['rl']['seconds']}"] if rl else []

    def figures(self, records: Records) -> list[Figure]:
        results = self.results_of(records)
        view = {v.key: v for v in VIEWS}
        asked: list[tuple[str, View, str, str, int, bool]] = [
            ("rl_gain_points", view["heldout"], "rl", "sft", 1, False),
            ("rl_vs_sft_continued_points", view["heldout"], "rl", "sft_continued", 1, False),
            ("greedy_change_points", view["heldout"], "rl", "sft", 1, True),
            ("best8_change_points", view["heldout"], "rl", "sft", 8, False),
            ("unseen_family_gain_points", view["unseen"], "rl", "sft", 1, False),
            ("hard_split_gain_points", view["hard"], "rl", "sft", 1, False),
        ]
        figures = []
        for name, tasks, new, old, k, greedy in asked:
            change = results.change(tasks, new, old, k=k, greedy=greedy)
            if change is not None:
                seeds = results.common_seeds(tasks, new, old, greedy=greedy)
                figures.append(points(name, change, seeds=seeds, note=_note(name, change, tasks)))
        return [*figures, *_busy(records), *self._against_synchronous(records)]

    def _against_synchronous(self, records: Records) -> list[Figure]:
        """The pace of the asynchronous run against the better synchronous one, in as many seconds from the start: later
        runs take more turns, which is slower for either. Mean over seeds. Raises CorruptArtifact."""
        ratios, whole, paces = {}, {}, []
        for arm, seed in records:
            if arm != "rl_sync" or ("rl", seed) not in records:
                continue
            (rl,) = self.curves_of("rl", seed, records)
            best, span_s = max(pace(curve) for curve in self.curves_of(arm, seed, records))
            (same, _), (all_of_it, _) = pace(rl, span_s), pace(rl)
            if best:
                ratios[seed], whole[seed] = same / best, all_of_it / best
                paces.append(best)
        if not ratios:
            return []
        ratio = mean_over_seeds("async_vs_sync", ratios, "x")
        told = ", ".join(f"{v:.3g}" for v in whole.values())
        peer = {
            "peer": "the same run, synchronous, best thread split, rollouts/s",
            "peer_value": sum(paces) / len(paces),
            "note": f"{ratio.note}; the whole asynchronous run against the start of the synchronous one: {told}",
        }
        return [ratio.model_copy(update=peer)]


def _busy(records: Records) -> list[Figure]:
    """Busy shares of the services during RL, mean over seeds."""
    figures = []
    rl = {seed: r["stages"]["rl"] for (arm, seed), r in records.items() if arm == "rl"}
    for name in ("trainer_busy", "engine_busy", "env_busy"):
        values = {seed: stage[name] for seed, stage in rl.items() if name in stage}
        if values:
            figures.append(mean_over_seeds(name, values, "share"))
    return figures


def _note(name: str, change: Estimate, view: View) -> str:
    """Per-seed values, and whether the bar of the claim is met: the gain itself, or the lower bound of a change."""
    told = f"by seed: {', '.join(f'{100 * v:.1f}' for v in change.per_seed)}"
    value, low, _ = change.points()
    if view.key == "heldout" and change.n_tasks < LEAST_TASKS:
        return f"{told}; bar: not tested, {change.n_tasks} tasks are fewer than {LEAST_TASKS}"
    if view.key == "hard":
        return told  # no bar was set for it
    if name == "rl_gain_points":
        met = value >= BARS[name] and low > 0
        return f"{told}; bar: at least {BARS[name]:g} and interval above 0: {'met' if met else 'missed'}"
    if name in BARS:
        return f"{told}; bar: lower bound above {BARS[name]:g}: {'met' if low > BARS[name] else 'missed'}"
    return f"{told}; bar: interval above 0: {'met' if low > 0 else 'missed'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of the error, which is printed on one line."""
    return main_of(FirstLoop, __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
