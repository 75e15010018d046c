"""What an engine's counters say about a stretch of its work: how many guesses held, what a swap of weights cost."""

from __future__ import annotations

from collections.abc import Mapping

from cadenza.orchestration.placement import Remote

STATS_S = 30.0


class EngineMetrics:
    """Differences between one reading of ``EngineService.stats`` and the next."""

    def __init__(self) -> None:
        self._seen: Mapping[str, float] = {}

    def since_last(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Since the reading before (the first time: since the engine's start); what did not happen is left out.

        ``accepted_K``: share of the K-th guesses (speculative decoding, see ``inference.speculative``) that held.
        ``swap_pause_steps``: how long a swap of weights kept the engine from decoding, in its own steps of mean length.
        """
        new = {name: value - self._seen.get(name, 0.0) for name, value in stats.items()}
        self._seen = dict(stats)
        found: dict[str, float] = {}
        place = 1
        while guessed := new.get(f"guessed_{place}"):
            found[f"accepted_{place}"] = new[f"held_{place}"] / guessed
            place += 1
        if new["swaps"] and new["steps"] and new["busy_s"] > new["swap_s"]:
            step_s = (new["busy_s"] - new["swap_s"]) / new["steps"]
            found["swap_pause_steps"] = new["swap_s"] / new["swaps"] / step_s
        return found


async def metrics_of(engine: Remote) -> dict[str, float]:
    """The same of everything that an engine has done. Raises TimeoutError, ServiceDied."""
    return EngineMetrics().since_last(await engine.ask("stats", deadline_s=STATS_S))
