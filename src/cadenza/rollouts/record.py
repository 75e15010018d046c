"""Rollout <-> bytes, for the sample store.

Layout: magic ``CDZR``, u16 format version, u16 zero, u32 CRC-32 of the rest, then zlib of: u32 length of the JSON
header, the header, the arrays' bytes one after another. The header is the rollout with every array replaced by
``[dtype, shape, offset]``. Little-endian.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cadenza.core.errors import CorruptArtifact, MissingArtifact, RolloutFailure
from cadenza.core.files import disk_errors
from cadenza.core.types import FORMAT_VERSION, Rollout, Segment, Verdict, to_plain

_MAGIC = b"CDZR"
_HEAD = struct.Struct("<4sHHI")
# The types of record; a reader accepts these and no others, so that a file cannot choose what numpy builds.
_DTYPES = {
    "ids_T": "<i4", "sampled_T": "|b1", "token_kind_T": "|i1", "logprob_S": "<f4", "version_S": "<i4",
    "routes_TLK": "|u1",
}  # fmt: skip
_MEND = "delete the sample; the run makes it again"


def to_bytes(rollout: Rollout) -> bytes:
    """Serializes a rollout; a typical one of 600 tokens takes about 2 kB."""
    blobs: list[bytes] = []
    offset = 0
    segments = []
    for segment in rollout.segments:
        plain: dict[str, Any] = {}
        for name in Segment.__slots__:
            value = getattr(segment, name)
            if name in _DTYPES and value is not None:
                array = np.ascontiguousarray(value, _DTYPES[name])
                plain[name] = [_DTYPES[name], list(array.shape), offset]
                blobs.append(array.tobytes())
                offset += len(blobs[-1])
            else:
                plain[name] = to_plain(value)
        segments.append(plain)
    header = {name: to_plain(getattr(rollout, name)) for name in Rollout.__slots__ if name != "segments"}
    text = json.dumps({**header, "segments": segments}, allow_nan=False, separators=(",", ":")).encode()
    body = zlib.compress(struct.pack("<I", len(text)) + text + b"".join(blobs), 1)
    return _HEAD.pack(_MAGIC, FORMAT_VERSION, 0, zlib.crc32(body)) + body


def from_bytes(data: bytes) -> Rollout:
    """Reads what ``to_bytes`` wrote. Raises CorruptArtifact for anything else, or for another format version."""
    if len(data) < _HEAD.size or data[:4] != _MAGIC:
        raise CorruptArtifact("a sample is not a rollout record", _MEND)
    _, version, _, crc = _HEAD.unpack_from(data)
    if version != FORMAT_VERSION:
        raise CorruptArtifact(
            f"a rollout record has format version {version}, this program reads {FORMAT_VERSION}",
            "use the version of cadenza that wrote it",
        )
    body = data[_HEAD.size :]
    if zlib.crc32(body) != crc:
        raise CorruptArtifact("a rollout record is damaged", _MEND)
    try:
        return _read(zlib.decompress(body))
    except (ValueError, KeyError, TypeError, struct.error, zlib.error) as error:
        raise CorruptArtifact(f"a rollout record cannot be read ({error})", _MEND) from error


def _read(raw: bytes) -> Rollout:
    (length,) = struct.unpack_from("<I", raw)
    header = json.loads(raw[4 : 4 + length])
    arrays = memoryview(raw)[4 + length :]
    segments = [_read_segment(plain, arrays) for plain in header.pop("segments")]
    verdict = header.pop("verdict")
    failure = verdict.pop("failure")
    branched = header.pop("branched_from")
    return Rollout(
        segments=segments,
        verdict=Verdict(failure=None if failure is None else RolloutFailure(**failure), **verdict),
        branched_from=None if branched is None else (branched[0], branched[1]),
        **header,
    )


def _read_segment(plain: dict[str, Any], arrays: memoryview) -> Segment:
    values = dict(plain)
    for name, dtype in _DTYPES.items():
        if values[name] is None:
            continue
        stored, shape, offset = values[name]
        if stored != dtype:
            raise ValueError(f"{name} has type {stored}")
        count = int(np.prod(shape, dtype=np.int64))
        values[name] = np.frombuffer(arrays, dtype, count, offset).reshape(shape).copy()
    values["turns"] = [(start, end) for start, end in values["turns"]]
    segment = Segment(**values)
    broken = segment.broken()
    if broken is not None:
        raise ValueError(broken)
    return segment


_COUNT = struct.Struct("<I")


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """One file of many records, each preceded by its length (u32)."""
    with disk_errors(path), path.open("wb") as file:
        for rollout in rollouts:
            data = to_bytes(rollout)
            file.write(_COUNT.pack(len(data)))
            file.write(data)


def read_rollouts(path: Path) -> list[Rollout]:
    """Reads what ``write_rollouts`` wrote. Raises MissingArtifact, or CorruptArtifact also for a torn end."""
    if not path.is_file():
        raise MissingArtifact(f"no rollouts at {path}", "run the stage that makes them")
    data = path.read_bytes()
    rollouts: list[Rollout] = []
    at = 0
    while at < len(data):
        if at + _COUNT.size > len(data):
            raise CorruptArtifact(f"{path} ends inside a record", _MEND)
        (size,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        if at + size > len(data):
            raise CorruptArtifact(f"{path} ends inside a record", _MEND)
        rollouts.append(from_bytes(data[at : at + size]))
        at += size
    return rollouts
