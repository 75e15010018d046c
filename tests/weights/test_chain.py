"""Weights arrive bit for bit or not at all, whatever is lost, damaged, overtaken or published twice."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.core.errors import CorruptArtifact, DeadlineExceeded, MissingArtifact, ResourceExhausted
from cadenza.core.store import ObjectStore
from cadenza.weights import Bits, Follower, Link, Publisher
from cadenza.weights.chain import Chain
from cadenza.weights.delta import decode, encode, nbytes

KINDS = {"float8_e4m3fn": np.uint8, "bfloat16": np.uint16, "float32": np.uint32}
DEADLINE_S = 60.0


def state(seed: int, sizes=((64, 8), (0,), (), (7,)), dtype: str = "bfloat16") -> dict[str, Bits]:
    random = np.random.default_rng(seed)
    top = np.iinfo(KINDS[dtype]).max
    return {
        f"t{i}": Bits(dtype, random.integers(0, top, shape, KINDS[dtype], endpoint=True))
        for i, shape in enumerate(sizes)
    }


def changed(before, seed: int, share: float):
    random = np.random.default_rng(seed)
    out = {}
    for name, bits in before.items():
        values = bits.values.copy()
        flat = values.reshape(-1)
        at = random.random(flat.size) < share
        flat[at] ^= random.integers(1, 255, int(at.sum()), flat.dtype)
        out[name] = Bits(bits.dtype, values)
    return out


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(a[n].values, b[n].values)
        and (a[n].dtype, a[n].values.dtype, a[n].values.shape)
        == (b[n].dtype, b[n].values.dtype, b[n].values.shape)
        for n in a
    )


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return ObjectStore(tmp_path / "store")


def publish(publisher: Publisher, version: int, weights) -> Link:
    return publisher.publish(version, weights, f"digest{version}").result(DEADLINE_S)


def flip(store: ObjectStore, link: Link) -> None:
    key = f"w/{link.version:08}-{link.payload}.bin"
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(sorted(KINDS)),
    st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]),
)
def test_a_delta_gives_other_bits_than_the_weights_it_was_made_of(seed, dtype, sizes, share):
    old = state(seed, sizes, dtype)
    new = changed(old, seed + 1, share)
    kept = {name: bits.values.copy() for name, bits in old.items()}
    assert same(decode(encode(new, old), old), new)
    assert same(decode(encode(new, None), None), new)
    assert all(np.array_equal(old[name].values, kept[name]) for name in old), "what was served was changed"


def test_few_changes_cost_as_much_as_the_weights():
    old = state(1, ((1000, 400),))
    new = changed(old, 2, 0.01)
    assert len(encode(new, old)) < 0.04 * nbytes(new)
    assert len(encode(old, old)) < 500


def test_a_delta_is_applied_to_weights_it_was_not_made_for():
    old, other = state(1), state(2)
    payload = encode(changed(old, 3, 0.01), old)
    for wrong in (other, None, {**old, "t0": Bits("bfloat16", old["t0"].values[:3])}):
        with pytest.raises(CorruptArtifact):
            decode(payload, wrong)
    with pytest.raises(ValueError, match="other tensors"):
        encode(old, {"t0": old["t0"]})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.data())
def test_a_damaged_payload_is_a_stack_trace_or_wrong_weights(seed, data):
    old = state(seed)
    new = changed(old, seed + 1, 0.05)
    payload = bytearray(encode(new, old))
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.booleans())
    try:
        found = decode(bytes(payload[:place]) if cut else bytes(payload), old)
    except CorruptArtifact:
        return
    assert same(found, new)  # a byte that means nothing, of the frame's header for example


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_follower_that_jumps_arrives_somewhere_else(tmp_path_factory, data):
    store = ObjectStore(tmp_path_factory.mktemp("store"))
    every = data.draw(st.integers(1, 6), "anchor_every")
    weights = [state(0)]
    with Publisher(store, "w", anchor_every=every, keep_anchors=100) as publisher:
        for version in range(data.draw(st.integers(1, 12), "versions")):
            if version:
                weights.append(changed(weights[-1], version, data.draw(st.sampled_from([0.0, 0.02, 0.9]))))
            assert publish(publisher, version, weights[version]).digest == f"digest{version}"
    follower = Follower(store, "w")
    for version in data.draw(st.lists(st.integers(0, len(weights) - 1), max_size=8), "jumps"):
        assert follower.advance(version).version == version
        assert follower.state is not None and same(follower.state, weights[version])
    assert follower.advance().version == len(weights) - 1
    assert follower.fallbacks == 0


def test_anchors_come_too_seldom_for_who_joins_late_or_nothing_is_ever_dropped(store):
    weights = state(0)
    with Publisher(store, "w", anchor_every=3, keep_anchors=2) as publisher:
        links = []
        for version in range(10):
            links.append(publish(publisher, version, weights))
            weights = changed(weights, version, 0.01)
        assert [link.version for link in links if link.is_anchor] == [0, 3, 6, 9]
        assert Chain(store, "w").versions() == [6, 7, 8, 9]
        assert len(store.keys("w/")) == 9  # four links, four payloads, one head
    with pytest.raises(MissingArtifact):
        Follower(store, "w").advance(5)


def test_a_delta_as_large_as_the_weights_is_kept(store):
    weights = state(0)
    with Publisher(store, "w") as publisher:
        publish(publisher, 0, weights)
        assert publish(publisher, 1, changed(weights, 1, 0.01)).is_anchor is False
        assert publish(publisher, 2, state(5)).is_anchor


def test_a_follower_with_damaged_weights_goes_on_with_them(store):
    weights = [state(0)]
    with Publisher(store, "w") as publisher:
        publish(publisher, 0, weights[0])
        follower = Follower(store, "w")
        follower.advance()
        weights.append(changed(weights[0], 1, 0.01))
        publish(publisher, 1, weights[1])
    assert follower.state is not None
    follower.state["t0"].values[0, 0] ^= 1
    assert follower.advance().version == 1
    assert same(follower.state, weights[1]) and follower.fallbacks == 1


def test_a_damaged_delta_stops_a_follower_although_an_anchor_comes_after_it(store):
    weights = [state(0)]
    with Publisher(store, "w") as publisher:
        publish(publisher, 0, weights[0])
        follower = Follower(store, "w")
        follower.advance()
        before = follower.link, follower.state
        for version in (1, 2):
            weights.append(changed(weights[-1], version, 0.01))
            link = publish(publisher, version, weights[version])
            if version == 1:
                flip(store, link)
        for version in (1, 2):
            with pytest.raises(CorruptArtifact):
                follower.advance(version)
        assert (follower.link, follower.state) == before
        publisher.anchor_next()
        weights.append(changed(weights[-1], 3, 0.01))
        assert publish(publisher, 3, weights[3]).is_anchor
    assert follower.advance().version == 3
    assert same(follower.state, weights[3])


def test_a_run_that_goes_on_from_an_older_checkpoint_mixes_two_chains(store):
    weights = [state(0)]
    for version in range(1, 6):
        weights.append(changed(weights[-1], version, 0.01))
    with Publisher(store, "w") as publisher:
        for version in range(5):
            publish(publisher, version, weights[version])
    follower = Follower(store, "w")
    follower.advance()
    other = [weights[2], changed(weights[2], 77, 0.01), changed(weights[2], 78, 0.01)]
    with Publisher(store, "w") as publisher:
        for version in (2, 3):
            publish(publisher, version, other[version - 2])
        assert Chain(store, "w").versions() == [0, 1, 2, 3]
        assert follower.advance().version == 3
        assert same(follower.state, other[1])
        publish(publisher, 4, other[2])
    assert len(store.keys("w/")) == 2 * 5 + 1
    assert same(follower.state, other[1])
    follower.advance(4)
    assert same(follower.state, other[2])


def test_training_waits_for_a_slow_store(store, monkeypatch):
    go, entered = threading.Event(), threading.Event()
    real = ObjectStore.put

    def slow(self, key, data):
        entered.set()
        assert go.wait(DEADLINE_S)
        return real(self, key, data)

    monkeypatch.setattr(ObjectStore, "put", slow)
    weights = [state(0)]
    for version in range(1, 4):
        weights.append(changed(weights[-1], version, 0.01))
    with Publisher(store, "w") as publisher:
        futures = [publisher.publish(0, weights[0], "d")]
        assert entered.wait(DEADLINE_S)
        futures += [publisher.publish(version, weights[version], "d") for version in (1, 2, 3)]
        assert not any(future.done() for future in futures)
        go.set()
        assert [future.result(DEADLINE_S).version for future in futures] == [0, 3, 3, 3]
    follower = Follower(store, "w")
    follower.advance()
    assert same(follower.state, weights[3])


def test_a_full_disk_leaves_a_chain_that_cannot_be_followed(store, monkeypatch):
    weights = [state(0)]
    for version in range(1, 5):
        weights.append(changed(weights[-1], version, 0.01))
    real = ObjectStore.put
    with Publisher(store, "w") as publisher:
        publish(publisher, 0, weights[0])
        publish(publisher, 1, weights[1])
        for version, failing in ((2, ".bin"), (3, ".json")):

            def full(self, key, data, failing=failing):
                if key.endswith(failing):
                    raise ResourceExhausted("no space left", "free some")
                return real(self, key, data)

            with monkeypatch.context() as patch:
                patch.setattr(ObjectStore, "put", full)
                with pytest.raises(ResourceExhausted):
                    publish(publisher, version, weights[version])
            follower = Follower(store, "w")
            assert follower.advance().version == 1
        assert publish(publisher, 4, weights[4]).is_anchor
    follower.advance()
    assert same(follower.state, weights[4])


@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b'{"format": 9}', b'{"format": 1}'])
def test_a_torn_head_or_link_is_a_stack_trace(store, torn):
    with Publisher(store, "w") as publisher:
        publish(publisher, 0, state(0))
    for key in ("w/head.json", "w/00000000.json"):
        kept = store.get(key)
        store.put(key, torn)
        with pytest.raises(CorruptArtifact):
            Follower(store, "w").advance()
        store.put(key, kept)
    Follower(store, "w").advance()
    with pytest.raises(MissingArtifact, match="no weights at other"):
        Follower(store, "other").advance()


def test_an_engine_serves_what_a_crashed_trainer_came_to_after_its_checkpoint(store):
    weights = state(0)
    with Publisher(store, "w") as publisher:
        for version in range(3):
            publish(publisher, version, weights)
    with Publisher(store, "w") as publisher:
        with pytest.raises(DeadlineExceeded, match="version 1 of the weights at w"):
            Follower(store, "w").wait_for(1, 0.05)
        publish(publisher, 1, weights)
        assert Follower(store, "w").wait_for(1, DEADLINE_S).version == 1
