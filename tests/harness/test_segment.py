"""A segment holds for every id what the engine said of it, and says where it said nothing."""

from __future__ import annotations

import numpy as np

from cadenza.core.types import UNREAD
from cadenza.harness.segment import SegmentBuilder
from cadenza.tokens import Sampled


def turn(ids, routes):
    return Sampled(list(ids), [-1.0] * len(ids), [0] * len(ids), "stop", routes_TLJ=routes)


def routes(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 3), np.uint8)


def build(builder: SegmentBuilder):
    (segment,) = builder.build(finish_reason="finish", sampling={}, digests={})
    return segment


def test_routes_belong_to_other_ids_or_are_made_up_where_the_engine_read_none():
    builder = SegmentBuilder()
    builder.add_given([1, 2, 3], [0, 0, 0])
    builder.add_sampled(
        turn([4, 5], routes(0, 4)), [1, 1]
    )  # 1, 2, 3, 4 were read; 5 is read with the next turn
    builder.add_given([6], [3])
    builder.add_sampled(turn([7, 8], routes(4, 3)), [1, 1])
    found = build(builder).routes_TLK
    assert found.shape == (8, 2, 3) and found.dtype == np.uint8  # pyright: ignore[reportOptionalMemberAccess]
    assert found[:7, 0, 0].tolist() == list(range(7)) and (found[7] == UNREAD).all()  # pyright: ignore[reportOptionalSubscript]


def test_an_engine_without_routes_gives_some():
    builder = SegmentBuilder()
    builder.add_given([1], [0])
    builder.add_sampled(turn([4, 5], None), [1, 1])
    assert build(builder).routes_TLK is None
