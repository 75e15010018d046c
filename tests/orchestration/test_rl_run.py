"""The reconciler in a world of any habits: it ends, trains each prompt once, and holds the staleness bound."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from world_made import CHAIN, Disk, Habits, Killed, MortalDatabase, Steps, World, tasks

from cadenza.core.errors import CadenzaError, CorruptArtifact, DeadlineExceeded, ServiceDied
from cadenza.core.rundb import RunDatabase
from cadenza.core.types import Rollout, RolloutFailure, Verdict
from cadenza.orchestration.rl_run import RLRun, RunConfig, RunResult, Services, _Group

pytestmark = pytest.mark.needs_train
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[tuple[RunDatabase, Path]]:
    folder = tmp_path_factory.mktemp("rl")
    with RunDatabase.open(folder / "cadenza.db", commit_interval_s=0.0) as database:
        yield database, folder


class Trial:
    """One RL run in a made-up world, over any number of processes."""

    def __init__(
        self, place: tuple[RunDatabase, Path], config: RunConfig, prompts: int, habits: Habits
    ) -> None:
        self.database, folder = place
        self.name = f"run-{next(NUMBERS)}"
        self.disk = Disk(folder / self.name)
        self.config, self.tasks, self.habits = config, tasks(prompts), habits
        self.steps = Steps()

    def process(self, seed: int, kill_at: int = -1) -> tuple[World, RLRun, RunResult]:
        """One process, from its start to its end. Raises Killed."""
        world = World(seed, self.disk, self.habits, kill_at)
        database: Any = MortalDatabase(self.database, world)
        run = RLRun(
            Services(world.trainer, world.engine, world.environment, "float32", CHAIN), self.tasks, self.config, 0,
            database, self.name, self.disk.folder, on_step=self.steps, clock=world.clock,
        )  # fmt: skip
        result = run.run()
        stale = sum(lag > run.max_staleness for lags in world.lags for lag in lags)
        assert stale <= run.counts["stragglers"], (world.lags, run.counts)
        return world, run, result

    def check(self, world: World, result: RunResult) -> None:
        """The ledger says what happened to the weights that are left."""
        trained = [task for step in world.history for task in step]
        assert len(trained) == len(set(trained)), "a prompt was trained on twice"
        ledger = {e.task_id: e for e in self.database.ledger(self.name)}
        finished = {t for t, e in ledger.items() if e.status in ("trained", "dropped")}
        assert finished == set(trained), "the ledger and the weights disagree"
        for number, step in enumerate(world.history, 1):
            for task in step:
                assert ledger[task].status == "dropped" or ledger[task].trained_step == number
        assert [s.step for s in self.database.steps(self.name)] == list(range(1, result.steps + 1))
        assert len(world.history) == result.steps
        first = result.steps - len(world.progress)  # a resumed process starts there
        least = [(first + i) / self.config.max_steps for i in range(len(world.progress))]
        assert all(a <= b <= 1.0 for a, b in zip(least, world.progress, strict=True)), (
            "the rate decays wrongly"
        )
        if result.stopped == "prompts":
            assert finished == {t.id for t in self.tasks}, "a prompt was lost"
        else:
            assert result.stopped == "steps" and result.steps == self.config.max_steps


SETTINGS = st.builds(
    RunConfig,
    max_steps=st.integers(1, 8),
    max_seconds=st.just(1e9),
    group_size=st.integers(1, 3),
    groups_per_step=st.integers(1, 5),
    most_groups_per_step=st.integers(1, 8),
    groups_in_flight=st.integers(1, 12),
    max_staleness=st.integers(0, 3),
    straggler_s=st.sampled_from([0.0, 1.0, 30.0]),
    synchronous=st.booleans(),
    attempts=st.integers(1, 3),
    checkpoint_every=st.integers(1, 3),
    idle_deadline_s=st.just(1e9),  # a world that does not end is found by its ticks
)
HABITS = st.builds(
    Habits,
    finish=st.sampled_from([0.25, 0.5, 1.0]),
    slow_share=st.sampled_from([0.0, 0.1]),
    fail_share=st.sampled_from([0.0, 0.2, 1.0]),
    spread=st.sampled_from([0.0, 0.5, 1.0]),
    step_share=st.sampled_from([0.1, 1.0]),
    load_share=st.sampled_from([0.1, 1.0]),
)
QUIET = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUIET
@given(config=SETTINGS, habits=HABITS, prompts=st.integers(1, 30), seed=st.integers(0, 10_000))
def test_some_setting_deadlocks_or_trains_a_prompt_twice(place, config, habits, prompts, seed):
    trial = Trial(place, config, prompts, habits)
    world, _, result = trial.process(seed)
    trial.check(world, result)


def test_a_group_is_ordered_under_weights_that_its_own_step_finds_too_old(place):
    """Weights take longer to swap than a step to make: found by the property above."""
    config = RunConfig(
        max_steps=3, max_seconds=1e9, group_size=1, groups_per_step=1, most_groups_per_step=1, groups_in_flight=1,
        max_staleness=1, straggler_s=0.0, attempts=1, idle_deadline_s=1e9,
    )  # fmt: skip
    habits = Habits(finish=0.25, slow_share=0.0, fail_share=0.2, spread=0.0, step_share=0.1, load_share=0.1)
    for seed in range(40):
        trial = Trial(place, config, 3, habits)
        world, _, result = trial.process(seed)
        trial.check(world, result)


@QUIET
@given(
    config=SETTINGS,
    habits=HABITS,
    prompts=st.integers(1, 20),
    seed=st.integers(0, 10_000),
    kills=st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
def test_a_kill_at_some_moment_corrupts_the_ledger(place, config, habits, prompts, seed, kills):
    trial = Trial(place, config, prompts, habits)
    for number, kill_at in enumerate([*kills, -1]):
        try:
            world, _, result = trial.process(seed + number, kill_at)
        except Killed:
            continue
        trial.check(world, result)
        break


def test_a_kill_between_checkpoint_and_ledger_trains_a_prompt_twice(place):
    """Every moment of a short run, one by one."""
    config = RunConfig(max_steps=3, group_size=2, groups_per_step=1, groups_in_flight=2, max_seconds=1e9)
    for kill_at in range(1, 60):
        trial = Trial(place, config, 12, Habits(finish=1.0))
        try:
            world, _, result = trial.process(7, kill_at)
        except Killed:
            world, _, result = trial.process(7)
        else:
            assert kill_at > 20
            trial.check(world, result)
            return
        trial.check(world, result)


def test_a_lost_ledger_lets_prompts_be_trained_on_again(place):
    config = RunConfig(max_steps=6, group_size=2, groups_per_step=1, groups_in_flight=2, max_seconds=1e9)
    trial = Trial(place, config, 30, Habits(finish=1.0))
    with pytest.raises(Killed):
        trial.process(7, 60)
    trial.database.rewind(trial.name, 0)
    with pytest.raises(CorruptArtifact, match="cannot tell which prompts were trained on"):
        trial.process(7)


def test_on_policy_runs_use_up_their_prompts_before_the_first_step(place):
    """Groups without spread do not count as enough; ordering more while a step is due would never let it start."""
    for keys in ({"max_staleness": 0}, {"synchronous": True}):
        usual = {"max_steps": 3, "group_size": 2, "groups_per_step": 4, "most_groups_per_step": 4}
        waits = {"groups_in_flight": 4, "max_seconds": 1e9, "straggler_s": 1e6}
        config = RunConfig.model_validate({**usual, **waits, **keys})
        trial = Trial(place, config, 60, Habits(finish=0.3, spread=1.0))
        world, _, result = trial.process(1)
        trial.check(world, result)
        assert result.stopped == "steps" and len(set(world.ordered)) <= 24
        assert all(lag == 0 for lags in world.lags for lag in lags)
        assert all(row["reward_length"] == pytest.approx(-0.0005) for row in trial.steps.rows.values()), (
            "what a price took of the reward is not told"
        )


def test_groups_that_solved_alike_count_because_some_ran_out_of_turns_or_were_failed_by_the_model():
    def spread(*found: tuple[float | None, float | None]) -> bool:
        group = _Group("g", tasks(1)[0], 0)
        for n, (score, reward) in enumerate(found):
            failure = None if score is not None else RolloutFailure("patch_refused", "", True, False)
            group.rollouts[n] = Rollout(
                "", "g", "t", [], [], "", Verdict(score, failure), {}, reward, "", {}, 0
            )
        return group.spread()

    assert not spread((1.0, 1.0), (1.0, 0.5)) and not spread((0.0, 0.0), (None, -0.3))
    assert spread((1.0, 1.0), (None, -0.3)) and spread((1.0, 0.4), (0.5, 0.4))
    assert not spread((1.0, 1.0), (0.0, None)), "what has no reward takes no part"


def test_ready_groups_go_stale_while_younger_ones_are_trained(place):
    config = RunConfig(
        max_steps=20, group_size=2, groups_per_step=1, groups_in_flight=20, max_staleness=2, max_seconds=1e9,
        straggler_s=1e6,
    )  # fmt: skip
    trial = Trial(place, config, 60, Habits(finish=1.0))
    world, run, result = trial.process(3)
    trial.check(world, result)
    assert max(lag for lags in world.lags for lag in lags) == 2 and run.counts["stragglers"] == 0


def test_a_straggler_is_waited_for_since_it_was_ordered_or_for_ever(place):
    """It holds the step back for ``straggler_s`` from when it does, is counted once, and is trained when it comes."""
    config = RunConfig(
        max_steps=12, group_size=1, groups_per_step=1, most_groups_per_step=1, groups_in_flight=2,
        max_staleness=1, straggler_s=5.0, max_seconds=1e9,
    )  # fmt: skip
    for seed in range(6):
        trial = Trial(place, config, 40, Habits(finish=1.0, slow_share=0.15, step_share=1.0, load_share=1.0))
        world, run, result = trial.process(seed)
        trial.check(world, result)
        late = sum(lag > 1 for lags in world.lags for lag in lags)
        assert late <= run.counts["stragglers"] <= 40


def test_retries_run_out_and_the_failure_is_trained_on(place):
    config = RunConfig(max_steps=99, group_size=2, groups_per_step=2, attempts=3, max_seconds=1e9)
    trial = Trial(place, config, 5, Habits(fail_share=1.0))
    world, run, result = trial.process(2)
    trial.check(world, result)
    assert result.stopped == "prompts"
    assert Counter(world.ordered) == {t.id: 2 * 3 for t in trial.tasks}
    assert {e.status for e in trial.database.ledger(trial.name)} == {"dropped"}
    assert run.counts["retried_sandbox_gone"] == 5 * 2 * 2
    assert len(trial.database.events(trial.name, "retry")) == 5 * 2 * 2


def test_a_dead_engine_uses_up_every_prompt(place):
    class Broken(World):
        def engine_stats(self):
            raise ServiceDied("the inference engine failed", "see the log")

    config = RunConfig(
        max_steps=9, group_size=2, groups_per_step=2, groups_in_flight=2, max_seconds=1e9, attempts=1
    )
    trial = Trial(place, config, 30, Habits(fail_share=1.0, finish=1.0))
    world = Broken(0, trial.disk, trial.habits)
    run = RLRun(
        Services(world.trainer, world.engine, world.environment, "float32", CHAIN), trial.tasks, config, 0,
        trial.database, trial.name, trial.disk.folder, on_step=trial.steps, clock=world.clock,
    )  # fmt: skip
    with pytest.raises(ServiceDied, match="engine failed"):
        run.run()
    assert len(set(world.ordered)) == 2


def test_a_trial_that_is_never_reported_hangs_the_run(place):
    config = RunConfig(max_steps=9, group_size=1, groups_in_flight=1, max_seconds=1e9, idle_deadline_s=20.0)
    trial = Trial(place, config, 3, Habits(finish=0.0))
    with pytest.raises(DeadlineExceeded, match="1 groups in flight"):
        trial.process(0)


def test_a_run_overruns_its_time_or_forgets_the_time_before_a_kill(place):
    config = RunConfig(max_steps=10**6, group_size=1, groups_per_step=1, max_seconds=20.0, groups_in_flight=2)
    trial = Trial(place, config, 10**4, Habits(step_share=1.0, load_share=1.0))
    world, _, result = trial.process(0)
    assert result.stopped == "seconds" and 20.0 <= world.clock() < 30.0
    longer = RunConfig.model_validate({**config.model_dump(), "max_seconds": 30.0})
    trial.config = longer
    again, _, second = trial.process(1)
    assert second.steps > result.steps and again.clock() < 15.0
    assert [s.step for s in trial.database.steps(trial.name)] == list(range(1, second.steps + 1))


@pytest.mark.parametrize(
    "bad",
    [{"groups_per_step": 0}, {"group_size": 0}, {"checkpoint_every": 0}, {"groups_in_flight": 0},
     {"max_staleness": -1}, {"attempts": 0}, {"most_groups_per_step": 0}],
)  # fmt: skip
def test_a_setting_that_can_never_make_a_step_is_accepted(bad):
    with pytest.raises(ValidationError):
        RunConfig(**bad)


def test_trainer_and_engine_disagree_and_the_run_goes_on_or_dies_of_its_own_message(place):
    class Apart(World):
        def environment_collect(self, wait_s):
            if self.step is not None:
                future, self.step = self.step[0], None
                future.set_result({"parity_tokens": 600.0, "k3": 0.5})
            return super().environment_collect(wait_s)

    trial = Trial(place, RunConfig(group_size=2, groups_per_step=1), 30, Habits(finish=1.0))
    world = Apart(0, trial.disk, trial.habits)
    run = RLRun(
        Services(world.trainer, world.engine, world.environment, "bfloat16", CHAIN), trial.tasks, trial.config, 0,
        trial.database, trial.name, trial.disk.folder, on_step=trial.steps, clock=world.clock,
    )  # fmt: skip
    with pytest.raises(CadenzaError, match="0.5 > 0.01"):
        run.run()
