"""Stage ``gate``: decides by the evaluation which policies may be served, and moves the aliases.

The aliases of a run are rows of the run database, ``RUN/candidate`` and ``RUN/serving``; each moves in one transaction,
so that whoever serves sees the old policy or the new one.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from cadenza.core.artifacts import copy_model
from cadenza.core.config import StrictConfig
from cadenza.core.errors import ConfigError, ForeignSample
from cadenza.core.files import write_bytes, write_json
from cadenza.core.types import Policy
from cadenza.evaluation.gate import Decision, GateConfig, decide
from cadenza.evaluation.report_inputs import DecisionRecord, append_lines
from cadenza.evaluation.result import EvalResult
from cadenza.pipelines.stages import Figures, Stage, StageContext


class GateStageConfig(StrictConfig):
    """``candidates``: policies in the order they ask to be served; the first meets nothing and is only looked at by
    itself. Each is compared with the one that is served by then. ``gate``: what may be lost."""

    candidates: tuple[str, ...] = Field(default=("sft", "rl"), min_length=1)
    gate: GateConfig = GateConfig()


class Gate(Stage[GateStageConfig]):
    """Artifact: the policy that is served then (a model directory; none when nothing passed), ``CANDIDATE.json`` and
    ``CANDIDATE.xml`` (JUnit), a decision each. Input ``evaluate``: the results; every other role is a policy of that
    name."""

    Config = GateStageConfig
    version = 2
    inputs = ("evaluate",)
    open_inputs = True

    def run(self, context: StageContext) -> Figures:
        from cadenza.core.rundb import rl_run_id  # SQLAlchemy

        served, promoted = "", 0
        for name in self.config.candidates:
            if name not in context.artifacts:
                raise ConfigError(
                    f"candidate {name!r} of stage {context.name!r} is no input of it",
                    f'add inputs = {{ {name} = "{name}" }} to it in the recipe',
                )
            results = _results(context, name)
            if not results:
                raise ConfigError(
                    f"candidate {name!r} of stage {context.name!r} was not evaluated",
                    "add it to the inputs of the stage that fills 'evaluate'",
                )
            run = rl_run_id(context.run_id, name)  # a policy that no RL made has a key of the same form
            policy = self._record(context, run, name, _judged(name, results))
            context.database.point(f"{context.run_id}/candidate", run, policy.version)
            decision = decide(results, _results(context, served), self.config.gate)
            self._keep(context, name, decision)
            context.progress.line(_sentence(decision))
            if decision.promote:
                context.database.point(f"{context.run_id}/serving", run, policy.version)
                served, promoted = name, promoted + 1
        if not served:  # what an earlier attempt decided is not served either
            context.database.unpoint(f"{context.run_id}/serving")
        else:
            copy_model(context.input(served), context.out)
        return {"serving": served, "promoted": promoted, "refused": len(self.config.candidates) - promoted}

    def _record(self, context: StageContext, run: str, name: str, digest: str) -> Policy:
        """The version that was judged: the newest with this digest; else one more, a copy of the newest (its engine
        served another dtype than RL's). A policy that no RL run has made is its version 0. Raises ForeignSample."""
        if digest:
            _require_own(name, context.input(name), digest)
        known = context.database.policies(run)
        for policy in reversed(known):
            if digest in ("", policy.digest):
                return policy
        newest = known[-1].version if known else None
        policy = Policy(name, 0 if newest is None else newest + 1, newest, digest)
        context.database.add_policy(run, policy)
        return policy

    def _keep(self, context: StageContext, name: str, decision: Decision) -> None:
        write_json(context.out / f"{name}.json", decision.model_dump(mode="json"))
        write_bytes(context.out / f"{name}.xml", decision.junit().encode())
        data = decision.model_dump(mode="json")
        context.database.event(context.run_id, "gate", data, wait=True)
        append_lines(context.out / "decisions.jsonl", [DecisionRecord.from_event("gate", data)])


def _results(context: StageContext, name: str) -> list[EvalResult]:
    """Every result of a policy; none for no policy."""
    if not name:
        return []
    found = [
        EvalResult.load(p) for p in sorted((context.input("evaluate") / "evaluations").glob(f"{name}-*.json"))
    ]
    return [result for result in found if result.policy == name]


def _judged(name: str, results: list[EvalResult]) -> str:
    """The digest of the weights that the results speak of; "" when none of them says it. Raises ForeignSample."""
    digests = {result.policy_digest for result in results} - {""}
    if len(digests) > 1:
        raise ForeignSample(
            f"candidate {name!r} was evaluated on weights {' and '.join(sorted(digests))}",
            "add --restart-from with the stage that fills 'evaluate' to evaluate it again",
        )
    return next(iter(digests), "")


def _require_own(name: str, model: Path, digest: str) -> None:
    """Raises ForeignSample where the judged weights are not those that would be served. An evaluation does not say its
    dtype: one of those that an engine serves must fit."""
    import torch

    from cadenza.model.digest import served_digest

    own = [served_digest(model, dtype) for dtype in (torch.bfloat16, torch.float32)]
    if digest not in own:
        raise ForeignSample(
            f"candidate {name!r} has weights {' or '.join(own)}, by dtype, and was evaluated on {digest}",
            "give the stage the evaluation of this policy, or add --restart-from with the stage that fills 'evaluate'",
        )


def _sentence(decision: Decision) -> str:
    if decision.promote:
        return f"gate: {decision.candidate} is served now" + (
            f" in the place of {decision.baseline}" if decision.baseline else ""
        )
    return f"gate: {decision.candidate} is refused: " + "; ".join(decision.reasons())
