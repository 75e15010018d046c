"""Bounded output: nothing is lost below the limit, and above it the count is exact."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cadenza.sandbox.guest.bounded import HeadTail


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(2, 60))
def test_head_and_tail_are_exact_and_the_marker_counts_the_rest(chunks, limit):
    keep = HeadTail(limit)
    for chunk in chunks:
        keep.feed(chunk)
    whole, half = b"".join(chunks), limit // 2
    if len(whole) <= 2 * half:
        assert keep.value() == whole and not keep.truncated
    else:
        marker = b"\n... %d bytes elided ...\n" % (len(whole) - 2 * half)
        assert keep.value() == whole[:half] + marker + whole[-half:] and keep.truncated
