"""Frames survive any split of the stream, and garbage is an error and not a hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.sandbox.guest import frames

messages = st.lists(
    st.tuples(
        st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=3),
        st.binary(max_size=50),
    ),
    max_size=5,
)


@given(messages, st.data())
def test_frames_come_out_whole_however_the_stream_is_cut(sent, data):
    stream = b"".join(frames.pack(message, payload) for message, payload in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, got = frames.Reader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[start:end])
    assert got == sent


def test_file_name_that_is_not_unicode_survives():
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    ((message, _),) = frames.Reader().feed(frames.pack({"path": name}))
    assert message["path"] == name


@pytest.mark.parametrize(
    "junk", [b"\xff" * 8, frames.HEADER.pack(2, 0) + b"[]", frames.HEADER.pack(3, 0) + b"nul"]
)
def test_broken_stream_is_reported(junk):
    with pytest.raises(frames.BrokenFrame):
        frames.Reader().feed(junk)
