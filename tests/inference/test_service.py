"""The engine's thread, its clients' exchanges, and what happens to them when something ends."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_made import policy, request

from cadenza.core.errors import DeadlineExceeded, ServiceDied
from cadenza.inference.client import EngineClient
from cadenza.inference.requests import EngineConfig
from cadenza.inference.service import EngineService
from cadenza.model.digest import weights_digest
from cadenza.model.hf import load_model, save_model
from cadenza.tokens import CompactRenderer, Sampling, SessionLost, Tokenizer
from cadenza.weights import ChainAddress, Publisher
from cadenza.weights.tensors import state_of

pytestmark = pytest.mark.needs_train
CONFIG = EngineConfig(slots=2, max_context=64, dtype="float32")
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def renderer() -> CompactRenderer:
    return CompactRenderer(Tokenizer.train(["def total(values):\n    return sum(values)\n"] * 20, 320))


@pytest.fixture(scope="module")
def directory(tmp_path_factory, renderer) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = policy(vocab_size=renderer.tokenizer.vocab_size)
    save_model(model, folder, eos_token_id=8, bos_token_id=1)
    return folder


@pytest.fixture
def service(directory) -> Iterator[EngineService]:
    service = EngineService(str(directory), CONFIG)
    yield service
    service.stop()


def collect(service: EngineService, client: str, count: int) -> list:
    done: list = []
    end = time.monotonic() + DEADLINE_S
    while len(done) < count and time.monotonic() < end:
        done += service.exchange(client, [], [], 0.5)
    return done


def test_an_exchange_waits_past_its_deadline_or_ends_before_the_answer(service):
    begun = time.monotonic()
    assert service.exchange("a", [], [], 0.05) == []
    assert 0.04 < time.monotonic() - begun < 5.0
    done = service.exchange("a", [request("a/0", [1, 2, 3])], [], DEADLINE_S)
    assert [c.session for c in done] == ["a/0"]


def test_work_and_swaps_leave_no_spans_or_leave_them_twice(service, directory):
    begun = time.time()
    service.exchange("a", [request("a/0", [1, 2, 3])], [], DEADLINE_S)
    service.load(load_model(directory).state_dict(), 1)
    service.exchange("a", [request("a/1", [1, 2, 3])], [], DEADLINE_S)
    collect(service, "a", 1)
    spans = service.take_spans()
    assert {lane for lane, _, _ in spans} == {"engine", "weights"}
    assert all(begun - 1.0 <= start <= end <= time.time() + 1.0 for _, start, end in spans)
    assert [start == end for lane, start, end in spans if lane == "weights"] == [True]
    assert 0 < service.stats()["busy_s"] <= service.stats()["wall_s"]
    assert not [lane for lane, _, _ in service.take_spans() if lane == "weights"]


def test_a_version_that_was_followed_is_not_the_one_that_is_served(service, directory, renderer, tmp_path):
    other = policy(7, vocab_size=renderer.tokenizer.vocab_size)
    tensors = {name: t.detach() for name, t in other.state_dict().items()}
    chain = ChainAddress(str(tmp_path))
    with Publisher.at(chain) as publisher:
        publisher.publish(3, state_of(tensors), weights_digest(tensors))
        assert service.follow(chain, 2, DEADLINE_S).version == 3
    (done,) = service.exchange("a", [request("a/0", [1, 2, 3])], [], DEADLINE_S)
    assert done.weights == {3: weights_digest(tensors)} == {3: service.digest()}
    with pytest.raises(DeadlineExceeded, match="version 4"):
        service.follow(chain, 4, 0.05)
    (done,) = service.exchange("a", [request("a/1", [1, 2, 3])], [], DEADLINE_S)
    assert set(done.weights) == {3}


def test_a_dead_engine_looks_busy_for_ever(service, monkeypatch):
    def broken():
        raise RuntimeError("gone")

    monkeypatch.setattr(service._engine, "step", broken)
    with pytest.raises(ServiceDied):
        service.exchange("a", [request("a/0", [1, 2, 3])], [], DEADLINE_S)
        service.exchange("a", [], [], DEADLINE_S)
    service._thread.join(DEADLINE_S)
    service.take_spans()
    assert service.take_spans() == []


def test_one_client_takes_another_clients_completions(service):
    service.exchange("a", [request("a/0", [1, 2, 3])], [], 0.0)
    service.exchange("b", [request("b/0", [4, 5, 6])], [], 0.0)
    assert [c.session for c in collect(service, "b", 1)] == ["b/0"]
    assert [c.session for c in collect(service, "a", 1)] == ["a/0"]
    assert service.exchange("b", [], [], 0.0) == []


def test_a_failed_engine_leaves_a_client_waiting(service):
    told: list[BaseException] = []

    def wait() -> None:
        try:
            service.exchange("patient", [], [], DEADLINE_S)
        except ServiceDied as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    service.load({"embed_tokens.weight": torch.zeros(2, 2)}, 1)
    with pytest.raises(ServiceDied, match="another model"):
        service.exchange("late", [], [], DEADLINE_S)
    waiting.join(DEADLINE_S)
    assert len(told) == 1 and not waiting.is_alive()
    for call in (
        service.stats,
        lambda: service.load({}, 1),
        lambda: service.exchange("late", [], [], 1.0),
    ):
        with pytest.raises(ServiceDied):
            call()


def test_a_bad_request_ends_the_engine_for_everybody(service):
    """Over the bare service: a token outside the vocabulary, and nothing to be fed."""
    for name, ids in ("unknown", [1, 10**6]), ("empty", []):
        (refused,) = service.exchange("bad", [request(name, ids)], [], DEADLINE_S)
        assert refused.session == name and refused.finish == "refused" and refused.reason
    done = service.exchange("good", [request("good/0", [1, 2, 3])], [], DEADLINE_S)
    assert [(c.session, c.finish) for c in done] == [("good/0", "length")]


def test_a_bad_request_loses_the_other_sessions_of_its_client(service, renderer):
    async def talk() -> None:
        async def exchange(*args):
            return await asyncio.to_thread(service.exchange, *args)

        client = EngineClient(exchange, renderer)
        try:
            bad, good = client.session(1), client.session(2)
            with pytest.raises(SessionLost, match="not in 0"):
                await bad.sample([1, 10**6], Sampling(max_tokens=4))
            assert (await good.sample([1, 2, 3], Sampling(max_tokens=4))).ids
        finally:
            await client.aclose()

    asyncio.run(talk())


def test_a_stopped_engine_answers_with_nothing_for_ever(service):
    service.stop()
    with pytest.raises(ServiceDied, match="stopped"):
        service.exchange("a", [], [], DEADLINE_S)


def test_a_session_closed_before_it_was_handed_over_keeps_its_slot(service):
    """An agent's deadline can strike before the next exchange: request and close then come together."""
    for i in range(4):  # more than slots
        service.exchange("a", [request(f"a/{i}", [1, 2, 3], max_tokens=40)], [f"a/{i}"], 0.0)
    done = service.exchange("a", [request("a/last", [1, 2], max_tokens=2)], [], DEADLINE_S)
    assert [c.session for c in done] == ["a/last"]


def test_weights_wait_for_a_request_to_be_swapped_in(service, renderer):
    new = policy(5, vocab_size=renderer.tokenizer.vocab_size).state_dict()
    service.load(new, 7)
    done = service.exchange("a", [request("a/0", [1, 2, 3])], [], DEADLINE_S)
    assert set(done[0].versions) == {7} and service.stats()["version"] == 7.0
    assert set(done[0].weights) == {7}


def over(service: EngineService):
    async def exchange(*arguments):
        return await asyncio.to_thread(service.exchange, *arguments)

    return exchange


def test_a_session_loses_tokens_between_turns_or_overruns_its_limit(service, renderer):
    async def go():
        client = EngineClient(over(service), renderer)
        session = client.session(seed=3)
        prompt, _ = renderer.render_prompt("mend it")
        first = await session.sample(prompt, Sampling(max_tokens=6))
        second = await session.sample([1], Sampling(max_tokens=5))
        session.close()
        session.close()
        again = client.session(seed=3)
        same = await again.sample(prompt, Sampling(max_tokens=6))
        await client.aclose()
        return first, second, same, client

    first, second, same, client = asyncio.run(asyncio.wait_for(go(), DEADLINE_S))
    assert len(first.ids) <= 6 and len(second.ids) <= 5 and client.waiting == 0
    assert len(first.ids) == len(first.logprobs) == len(first.versions)
    assert same.ids == first.ids, "the same seed sampled another turn"


def test_a_request_after_the_engine_was_lost_waits_until_the_trial_times_out(renderer):
    async def broken(*_):
        raise ServiceDied("the engine died", "run again")

    async def go():
        client = EngineClient(broken, renderer)
        session = client.session(seed=0)
        for s in (session, session, client.session(seed=1)):
            with pytest.raises(SessionLost, match="engine died"):
                await s.sample([1], Sampling())
        assert isinstance(client.failure, ServiceDied) and client.waiting == 0
        await client.aclose()

    asyncio.run(asyncio.wait_for(go(), DEADLINE_S))


def test_cores_given_to_the_service_but_not_to_the_thread_that_multiplies(service):
    seen: list[int] = []
    step = service._engine.step

    def spy():
        seen.append(torch.get_num_threads())
        return step()

    service._engine.step = spy
    for threads in (2, 1):
        service.set_threads(threads)
        service.exchange("a", [request(f"s{threads}", [20, 21])], [], 0.0)
        collect(service, "a", 1)
        assert seen[-1] == threads


def test_the_engine_takes_the_core_from_the_tools_it_waits_for(service):
    service.exchange("a", [request("s", [20, 21])], [], 0.0)
    collect(service, "a", 1)
    own, engine = (os.getpriority(os.PRIO_PROCESS, t) for t in (0, service._thread.native_id))
    assert engine == min(own + CONFIG.niceness, 19) > own
