"""The environment service with real sandboxes, and one whole RL run in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from cadenza.core.errors import ServiceDied
from cadenza.core.rundb import RunDatabase
from cadenza.core.types import Rollout, Task, parse_weights
from cadenza.harness import Limits
from cadenza.inference.requests import EngineConfig
from cadenza.inference.service import EngineService
from cadenza.model.config import ModelConfig
from cadenza.model.hf import save_model
from cadenza.model.transformer import PolicyModel
from cadenza.orchestration.environment import EnvironmentConfig, EnvironmentService, Order
from cadenza.orchestration.placement import InProcess
from cadenza.orchestration.rl_run import RLRun, RunConfig, Services
from cadenza.tasks.generate import GeneratorConfig, generate_split
from cadenza.tokens import Tokenizer
from cadenza.training.config import RLStepConfig
from cadenza.training.trainer import TrainerService
from cadenza.weights import ChainAddress

pytestmark = [pytest.mark.needs_train, pytest.mark.needs_namespaces]
CONFIG = EnvironmentConfig(agent=Limits(max_turns=2, max_tokens_per_turn=8, wall_s=30.0))
ENGINE = EngineConfig(slots=8, max_context=512, dtype="float32")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[list[Task], Path]:
    """Two generated tasks and a random model of a few thousand weights with a tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    config = GeneratorConfig.model_validate({"splits": {"train": {"count": 2}}})
    tasks = generate_split(config, "train", folder / "train")
    tokenizer = Tokenizer.train(["def total(values):\n    return sum(values)\n"] * 20, 320)
    model = PolicyModel(
        ModelConfig(
            vocab_size=tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16,
            n_experts=2, experts_per_token=1, d_expert=16, d_shared=16, max_positions=512,
        )
    )  # fmt: skip
    model.initialize(0)
    save_model(model, folder / "model", eos_token_id=8, bos_token_id=1)
    tokenizer.save(folder / "model")
    return tasks, folder / "model"


def test_another_backend_is_chosen_silently():
    with pytest.raises(ValidationError):
        EnvironmentConfig.model_validate({"backend": "docker"})


def test_a_dead_engine_fails_trial_after_trial(made):
    tasks, model = made
    with InProcess() as placement:
        engine = placement.spawn("engine", EngineService, str(model), ENGINE)
        environment = placement.spawn("environment", EnvironmentService, engine, str(model), CONFIG)
        placement.kill(engine)
        environment.call("submit", [Order(("g", 0, 0), tasks[0], 1, 1.0)]).result(30)
        with pytest.raises(ServiceDied):
            environment.call("collect", 30.0).result(60)
        for method, argument in (("submit", []), ("collect", 0.0)):
            with pytest.raises(ServiceDied):
                environment.call(method, argument).result(30)


def test_a_defect_in_one_trial_loses_its_slot_without_a_word(made):
    tasks, model = made
    with InProcess() as placement:
        engine = placement.spawn("engine", EngineService, str(model), ENGINE)
        environment = placement.spawn("environment", EnvironmentService, engine, str(model), CONFIG)
        broken = Order(("g", 0, 0), tasks[0], "not a seed", 1.0)  # type: ignore[arg-type]
        environment.call("submit", [broken]).result(30)
        with pytest.raises(ServiceDied, match="environment service failed"):
            environment.call("collect", 30.0).result(60)


@pytest.mark.slow
def test_a_real_run_does_not_come_to_its_end(made, tmp_path):
    tasks, model = made
    rows: list[dict] = []
    rollouts: list[Rollout] = []
    step = RLStepConfig(warmup_steps=1)
    config = RunConfig(
        max_steps=2, group_size=2, groups_per_step=1, most_groups_per_step=1, groups_in_flight=2, step=step,
        step_deadline_s=60.0, idle_deadline_s=60.0,
    )  # fmt: skip
    with InProcess() as placement, RunDatabase.open(tmp_path / "cadenza.db") as database:
        chain = ChainAddress(str(tmp_path / "store"))
        engine = placement.spawn("engine", EngineService, str(model), ENGINE)
        trainer = placement.spawn("trainer", TrainerService, str(model), step, 1, False, chain)
        environment = placement.spawn("environment", EnvironmentService, engine, str(model), CONFIG)
        run = RLRun(
            Services(trainer, engine, environment, "float32", chain), tasks, config, 0, database, "run/rl",
            tmp_path / "c",
            on_step=lambda _step, row: rows.append(row), on_rollout=lambda _task, rollout: rollouts.append(rollout),
        )  # fmt: skip
        result = run.run()
        assert (result.steps, result.stopped) == (2, "steps") and len(rows) == 2 and len(rollouts) == 4
        assert {e.status for e in database.ledger("run/rl")} == {"trained"}
        assert all(row["delta_bytes"] > 0 and row["weights_bytes"] > 0 and row["sync_s"] > 0 for row in rows)
        digests = {p.version: p.digest for p in database.policies("run/rl")}
        assert set(digests) == {0, 1, 2} and environment.call("stats").result(10)["active"] == 0.0
        for rollout in rollouts:
            assert rollout.verdict.failure is None and rollout.reward is not None
            assert all(s.broken() is None and set(s.version_S) <= {0, 1, 2} for s in rollout.segments)
            for s in rollout.segments:
                echoed = parse_weights(s.digests["weights"])
                assert set(s.version_S) == set(echoed) and echoed.items() <= digests.items()
        again = RLRun(
            Services(trainer, engine, environment, "float32", chain), tasks, config, 0, database, "run/rl",
            tmp_path / "c",
            on_step=lambda _step, row: rows.append(row),
        ).run()  # fmt: skip
        assert (again.steps, again.stopped, len(rows)) == (2, "steps", 2)
