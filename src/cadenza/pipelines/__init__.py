"""Recipes (TOML, shipped in the package) and the runner that chains and resumes their stages.

>>> plan = plan_recipe("demo", ["seed=1"])      # doctest: +SKIP
>>> run_plan(plan, Path("runs/demo-1"))         # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from cadenza.pipelines.plan import Plan, make_plan, plan_recipe
from cadenza.pipelines.stages import Figures, Stage, StageContext

if TYPE_CHECKING:
    from cadenza.pipelines.runner import RunOutcome, run_plan

__all__ = ["Figures", "Plan", "RunOutcome", "Stage", "StageContext", "make_plan", "plan_recipe", "run_plan"]


def __getattr__(name: str) -> Any:
    """The runner is loaded when it is asked for: it needs SQLAlchemy, and a plan does not."""
    if name in ("RunOutcome", "run_plan"):
        from cadenza.pipelines import runner

        return getattr(runner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
