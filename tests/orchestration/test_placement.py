"""In this process or as Ray actors: the same results and the same typed errors, and death is an error, not a hang."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
from services_made import Adder, Refuses

from cadenza.core.errors import CadenzaError, MissingArtifact, SandboxUnavailable, ServiceDied
from cadenza.orchestration.placement import InProcess, Placement, RayPlacement

pytestmark = pytest.mark.needs_train
DEADLINE_S = 60.0


def first_error(use) -> CadenzaError:
    with pytest.raises(CadenzaError) as caught:
        use()
    return caught.value


def behaves(placement: Placement) -> None:
    """What every placement promises."""
    adder = placement.spawn("adder", Adder, 5)
    assert adder.call("add", 1, 2).result(DEADLINE_S) == 8
    assert adder.call("add", placement.put(2)).result(DEADLINE_S) == 10
    error = first_error(lambda: adder.call("fail").result(DEADLINE_S))
    assert type(error) is MissingArtifact and (error.cause, error.mend) == ("no such thing", "make one")
    waiting = adder.call("wait")  # calls of one service overlap
    adder.call("wake").result(DEADLINE_S)
    assert waiting.result(DEADLINE_S) is True
    assert asyncio.run(adder.ask("add", 1, deadline_s=DEADLINE_S)) == 11
    refused = first_error(lambda: placement.spawn("refuses", Refuses).call("use").result(DEADLINE_S))
    assert type(refused) is SandboxUnavailable and refused.mend == "allow them"
    placement.kill(adder)
    placement.kill(adder)
    assert type(first_error(lambda: adder.call("add", 1).result(DEADLINE_S))) is ServiceDied


def test_services_in_this_process_break_a_promise():
    with InProcess() as placement:
        behaves(placement)


def test_services_are_ended_before_those_that_use_them():
    ended: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def stop(self) -> None:
            ended.append(self.name)

    with InProcess() as placement:
        for name in ("engine", "environment"):
            placement.spawn(name, Noted, name)
    assert ended == ["environment", "engine"]


def test_an_unanswered_call_is_awaited_for_ever():
    async def go(remote) -> None:
        with pytest.raises(TimeoutError):
            await remote.ask("wait", deadline_s=0.05)

    with InProcess() as placement:
        asyncio.run(go(placement.spawn("adder", Adder, 0)))


def test_in_process_placement_imports_ray(command_environment):
    code = (
        "import sys; from cadenza.orchestration.placement import InProcess; "
        "InProcess().close(); sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=command_environment, check=False).returncode == 0


@pytest.mark.slow
def test_ray_answers_sigterm_in_the_place_of_the_run():
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    try:
        with RayPlacement() as placement:
            os.kill(os.getpid(), signal.SIGTERM)
            placement.put(1)
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_ray_actors_break_a_promise_or_a_killed_one_hangs_its_caller(monkeypatch, capfd):
    folder = os.path.dirname(__file__)
    paths = [folder, os.path.join(folder, "..", "..", "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # for the workers
    with RayPlacement() as placement:
        behaves(placement)
        told = threading.Event()
        monkeypatch.setattr(logging.getLogger("cadenza.ray"), "warning", lambda *_: told.set())
        adder = placement.spawn("adder", Adder, 0)
        process = adder.call("where").result(DEADLINE_S)
        waiting = adder.call("wait")
        os.kill(process, signal.SIGKILL)
        died = first_error(lambda: waiting.result(DEADLINE_S))
        assert type(died) is ServiceDied and "memory" in died.mend  # the usual reason why a system kills one
        assert type(first_error(lambda: adder.call("add", 1).result(DEADLINE_S))) is ServiceDied
        assert told.wait(DEADLINE_S)
    assert capfd.readouterr().out == ""  # stdout may belong to a JSON object
