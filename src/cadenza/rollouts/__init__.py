"""One trial from lease to reward, the scripted expert, the driver of many trials, the record format."""

from cadenza.rollouts.driver import Trial, run_trials
from cadenza.rollouts.expert import SCRIPTED_VERSION, ExpertConfig, ScriptedExpert
from cadenza.rollouts.trial import Deadlines, run_trial

__all__ = [
    "SCRIPTED_VERSION", "Deadlines", "ExpertConfig", "ScriptedExpert", "Trial", "run_trial", "run_trials",
]  # fmt: skip
