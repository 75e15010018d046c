from __future__ import annotations

import dataclasses
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cadenza.core.errors import CorruptArtifact, RolloutFailure
from cadenza.core.types import Rollout, Segment, Verdict
from cadenza.rollouts.record import from_bytes, to_bytes


@st.composite
def segments(draw):
    sampled = draw(hnp.arrays(np.bool_, st.integers(0, 30)))
    count, inside = len(sampled), int(sampled.sum())
    routed = draw(st.booleans())
    return Segment(
        kind=draw(st.sampled_from(["act", "summary"])),
        ids_T=draw(hnp.arrays(np.int32, count)),
        sampled_T=sampled,
        token_kind_T=draw(hnp.arrays(np.int8, count, elements=st.integers(0, 4))),
        logprob_S=draw(hnp.arrays(np.float32, inside, elements=st.floats(-100, 0, width=32))),
        version_S=draw(hnp.arrays(np.int32, inside)),
        turns=draw(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 30)), max_size=3)),
        finish_reason="finish",
        sampling={"temperature": draw(st.floats(0, 2))},
        digests={"weights": "w"},
        parent=draw(st.none() | st.integers(0, 3)),
        routes_TLK=draw(hnp.arrays(np.uint8, (count, 2, 3))) if routed else None,
    )


verdicts = st.builds(
    Verdict, st.floats(0, 1), tests=st.dictionaries(st.text(max_size=5), st.just("passed"))
) | st.builds(
    Verdict,
    st.none(),
    st.builds(RolloutFailure, st.just("engine_lost"), st.text(max_size=5), st.booleans(), st.booleans()),
)
rollouts = st.builds(
    Rollout,
    id=st.text(max_size=5),
    group_id=st.just("g"),
    task_id=st.just("t"),
    segments=st.lists(segments(), max_size=2),
    trace=st.lists(st.fixed_dictionaries({"call": st.text(max_size=9)}), max_size=2),
    patch=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    verdict=verdicts,
    rewards=st.dictionaries(st.just("outcome"), st.floats(-1, 1)),
    reward=st.none() | st.floats(-1, 1),
    status=st.just("finished"),
    timings=st.just({"agent": 0.5}),
    seed=st.integers(0, 2**40),
    branched_from=st.none() | st.tuples(st.text(max_size=3), st.integers(0, 5)),
)


def same(a, b):
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    elif dataclasses.is_dataclass(a):
        assert type(a) is type(b)
        for field in dataclasses.fields(a):
            same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


@settings(deadline=None, max_examples=40)
@given(rollout=rollouts)
def test_a_rollout_survives_the_store_bit_for_bit(rollout):
    same(rollout, from_bytes(to_bytes(rollout)))


def one() -> Rollout:
    verdict = Verdict(1.0)
    segment = Segment(
        "act", np.arange(4, dtype=np.int32), np.ones(4, np.bool_), np.zeros(4, np.int8), np.zeros(4, np.float32),
        np.zeros(4, np.int32), [(0, 4)], "finish", {}, {},
    )  # fmt: skip
    return Rollout("r", "g", "t", [segment], [], "", verdict, {}, 1.0, "finished", {}, 0)


def test_damage_and_foreign_bytes_are_named():
    data = to_bytes(one())
    for bad in (b"", b"CDZR", data[:-1], data[:20] + b"x" + data[21:], b"PK" + data[2:]):
        with pytest.raises(CorruptArtifact):
            from_bytes(bad)


def test_another_format_version_is_refused_and_not_guessed():
    data = to_bytes(one())
    with pytest.raises(CorruptArtifact, match="format version 9"):
        from_bytes(data[:4] + struct.pack("<H", 9) + data[6:])


def test_a_record_whose_arrays_do_not_fit_is_refused():
    data = to_bytes(one())
    raw = zlib.decompress(data[12:])
    for old, new in (
        (b'"<i4",[4]', b'"<i4",[9]'),
        (b'"|b1",[4]', b'"|b1",[3]'),
        (b'"<f4",[4]', b'"<f8",[4]'),
    ):
        body = zlib.compress(raw.replace(old, new, 1))
        with pytest.raises(CorruptArtifact):
            from_bytes(struct.pack("<4sHHI", b"CDZR", 1, 0, zlib.crc32(body)) + body)


def test_a_segment_that_breaks_its_invariant_is_not_read():
    rollout = one()
    rollout.segments[0].logprob_S = np.zeros(3, np.float32)
    with pytest.raises(CorruptArtifact):
        from_bytes(to_bytes(rollout))
