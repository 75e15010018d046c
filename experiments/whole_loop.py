"""The claims of the whole loop: summaries against a sliding window, guessing ahead, replay, deltas, a round with users.

    python experiments/whole_loop.py                     everything that is not done yet
    python experiments/whole_loop.py --list              what is done, what remains
    python experiments/whole_loop.py --only-arm rl_summary --seed 1
    python experiments/whole_loop.py --pool              only the figures, from what is done

An arm of a seed is done when docs/results/whole_loop/<arm>-seed<k>.json exists. Figures go to
docs/results/whole_loop.jsonl. Nothing here looks at held-out tasks but the arms `before` (SFT's rates) and `eval_*`;
nothing is chosen by what they find.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import router_replay
import speculative
from arms import Arm, Claim, Records, StageRun
from command import main_of

from cadenza.evaluation.figures import Figure, mean_over_seeds, points
from cadenza.evaluation.result import EvalResult
from cadenza.evaluation.statistics import (
    Outcomes,
    paired_change,
    pass_at_k,
)

LONG = "heldout_hard"  # the split whose tasks need several contexts


class WholeLoop(Claim):
    """Summaries, trained and not, against a sliding window, and what the model that they leave can do."""

    name = "whole_loop"
    recipe = "proof-loop"
    arms = (
        Arm("prepare", ("tasks", "base", "cpt", "mtp", "long", "sft_summary", "sft_sliding")),
        # What is easy is said by SFT, before RL begins.
        Arm("before", ("eval_before", "eval_before_sliding"), ("prepare",)),
        Arm("rl_summary", ("rl_summary",), ("prepare",)),
        Arm("rl_sliding", ("rl_sliding",), ("prepare",)),
        Arm("realtime", ("realtime",), ("prepare", "rl_summary")),
        Arm("eval_windows", ("eval_summary", "eval_sliding"), ("before", "rl_summary", "rl_sliding")),
        # A window whose agent keeps a list, which the harness carries over: what else memory can be.
        Arm("rl_todo", ("sft_todo", "rl_todo"), ("prepare",)),
        Arm("eval_todo", ("eval_todo",), ("eval_windows", "rl_todo")),
        Arm("speculative", (), ("prepare", "rl_summary")),
        Arm("replay", (), ("prepare", "rl_summary")),
    )
    evaluated = ("before", "eval_windows", "eval_todo")
    conditions: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "speculative": speculative.Sizes().conditions(),
        "replay": router_replay.Conditions().conditions(),
    }

    def execute(self, arm: Arm, seed: int) -> list[StageRun]:
        """As for every claim; arms without stages measure the model that the seed's RL has left."""
        if arm.stages:
            return super().execute(arm, seed)
        plan = self.plan(seed)
        self.require_artifacts(arm, plan, seed)
        run, begun = self.run_folder(plan, seed), time.monotonic()
        if arm.name == "speculative":
            # Of the whole plan: recipe.toml in the run's folder has the stages of the arm that ran last.
            found: Any = speculative.measure(run, "rl_summary", plan.stage_named("sft_summary"))
        else:
            found = router_replay.measure(run, "rl_summary", "demos_summary")
        return [StageRun(arm.name, run / arm.name, time.monotonic() - begun, {"found": found})]

    def figures(self, records: Records) -> list[Figure]:
        results = {k: self._by_policy(records, k) for (arm, k) in records if arm == "eval_windows"}
        with_list = {k: by for k, by in results.items() if ("eval_todo", k) in records}
        claims = [*_summaries(results), *_lists(with_list)] if results else []
        return [*claims, *_deltas(records), *_stages(records), *_model(records)]

    def _by_policy(self, records: Records, seed: int) -> dict[tuple[str, str], EvalResult]:
        """Sampled results of one seed by policy and suite. Policies with summaries and with a sliding window have
        different harnesses: that is what is compared, so the harness may differ here and nothing else."""
        folder = self.results / self.name / "evaluations"
        kept = [records[arm, seed] for arm in self.evaluated if (arm, seed) in records]
        names = [name for record in kept for name in record["evaluations"]]
        found = [EvalResult.load(folder / name) for name in names]
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
            note = f"{new} {_runs(results, new)}; {old} {_runs(results, old)}"
            if old == "sft_summary":
                note += "; all that RL has changed, not the summaries alone"
            elif len(_outcomes(results, "sft_sliding", LONG)) == len(seeds):
                note += f"; before RL {_rates(results, 'sft_summary')} and {_rates(results, 'sft_sliding')}"
            figures.append(points(name, paired_change(*sides), seeds=seeds, note=note))
    return figures


def _lists(results: Results) -> list[Figure]:
    """Summaries against a window whose agent keeps a list of what is left to do."""
    if not results:
        return []
    change = paired_change(_outcomes(results, "rl_summary", LONG), _outcomes(results, "rl_todo", LONG))
    note = f"rl_todo {_runs(results, 'rl_todo')}; no bar"
    return [points("summary_vs_todo_points", change, seeds=list(results), note=note)]


def _runs(results: Results, policy: str) -> str:
    """What the policy's runs on the long split were like."""
    records = [r for by in results.values() for r in by[policy, LONG].records if r.solved is not None]
    contexts = [r.contexts for r in records if r.contexts is not None]
    tokens = sum(r.tokens for r in records) / len(records)
    several = sum(n > 1 for n in contexts) / max(1, len(contexts))
    mean = sum(contexts) / max(1, len(contexts))
    budget = sum(r.ended == "budget" for r in records) / len(records)
    told = f"solves {_rates(results, policy)} by seed, {tokens:.0f} sampled tokens a run"
    return told + f", {mean:.1f} contexts, {several:.0%} took several, {budget:.0%} ended by the budget"


def _rates(results: Results, policy: str) -> str:
    """pass@1 on the long split, seed by seed."""
    return ", ".join(f"{np.nanmean(pass_at_k(o).values_N):.1%}" for o in _outcomes(results, policy, LONG))


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
        note = (
            "compressed deltas, whole copies included, against plain weights"
            if name == "delta_vs_full"
            else ""
        )
        if values:
            figures.append(mean_over_seeds(name, values, unit, better=better, note=note))
    return figures


def _model(records: Records) -> list[Figure]:
    """What guessing ahead and router replay do for the model of RL."""
    figures = []
    for name, figures_of in (("speculative", speculative.figures_of), ("replay", router_replay.figures_of)):
        found = {k: r["stages"][name]["figures"]["found"] for (arm, k), r in records.items() if arm == name}
        figures += figures_of(found) if found else []
    return figures


def _stages(records: Records) -> list[Figure]:
    """What single stages have found out: perplexity far out in a row, and whether damaged weights were held back."""
    long = {k: r["stages"]["long"]["figures"] for (arm, k), r in records.items() if arm == "prepare"}
    rounds = {k: r["stages"]["realtime"]["figures"] for (arm, k), r in records.items() if arm == "realtime"}
    rounds = {k: f for k, f in rounds.items() if "damaged_refused" in f}  # drills may be left out
    figures = []
    if long:
        ratios = {
            k: f["perplexity_after_quarter4"] / f["perplexity_unstretched_quarter4"] for k, f in long.items()
        }
        first = [f["perplexity_after_quarter1"] / f["perplexity_unstretched_quarter1"] for f in long.values()]
        note = "perplexity in the last quarter of rows four times as long, after the phase against before; in the "
        note += f"first quarter, where no position is new: {sum(first) / len(first):.3g}"
        figures.append(mean_over_seeds("longctx_perplexity_ratio", ratios, "x", better="lower", note=note))
    if rounds:
        both = {k: float(f["damaged_refused"] and f["damaged_rolled_back"]) for k, f in rounds.items()}
        note = "refused by the gate, and taken back by the canary when it was let past; a round that lets it "
        note += "through fails and has no record"
        figures.append(mean_over_seeds("bad_checkpoint_refused", both, "share", note=note))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of the error, which is printed on one line."""
    return main_of(WholeLoop, __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
