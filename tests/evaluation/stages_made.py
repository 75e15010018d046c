"""Stages that write what real ones write, at once: the driver's tests run them through the real runner."""

from __future__ import annotations

from runs_made import evaluation

from cadenza.core.config import StrictConfig
from cadenza.evaluation.report_inputs import MetricWriter
from cadenza.pipelines import Stage


class Plain(Stage):
    """Leaves an artifact; as an RL stage also metrics whose pace follows `pace`."""

    class Config(StrictConfig):
        pace: float = 0.0
        budget_s: float = 0.0

    open_inputs = True

    def run(self, context):
        (context.out / "made").write_text(f"{context.name} {self.config.budget_s}")
        if self.config.pace:
            with MetricWriter(context.out, context.name) as out:
                for n in range(5):
                    out.write(
                        10 + n, n, rollouts_trained=n * self.config.pace, trainer_busy=0.4 + n / 10, engine_busy=0.7,
                        env_busy=0.2,
                    )  # fmt: skip
        return {}


class Eval(Stage):
    """EvalResults of three policies with known skill, and the table of a temperature."""

    class Config(StrictConfig):
        tasks: int = 250  # four in five are of the main view

    open_inputs = True

    def run(self, context):
        for policy, skill in (("sft", -0.5), ("sft_continued", -0.4), ("rl", 0.9)):
            (context.out / f"temperature-{policy}.json").write_text('{"temperature": 0.7}')
            for temperature, samples in ((0.7, 8), (0.0, 1)):
                result = evaluation(
                    policy, "heldout", context.seed, temperature, self.config.tasks, samples, skill=skill
                )
                result.save(context.out / "evaluations" / f"{policy}-heldout-{temperature}.json")
            hard = evaluation(policy, "heldout_hard", context.seed, 0.7, 40, 2, skill=skill)
            hard.save(context.out / "evaluations" / f"{policy}-hard.json")
        return {}
