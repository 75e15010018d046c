"""Recipes (TOML, shipped in the package) and the runner that chains and resumes their stages."""

from cadenza.pipelines.plan import Plan, make_plan, plan_recipe
from cadenza.pipelines.runner import RunOutcome, StageOutcome, run_plan
from cadenza.pipelines.stages import Figures, Stage, StageContext

__all__ = [
    "Figures",
    "Plan",
    "RunOutcome",
    "Stage",
    "StageContext",
    "StageOutcome",
    "make_plan",
    "plan_recipe",
    "run_plan",
]
