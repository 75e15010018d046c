"""What changed between two versions of a set of weights, in the raw bits of the serving dtype.

A delta says which elements have other bits and what they are now. It overwrites: an arithmetic difference does not give
the new value back (a + (b - a) is not b in floating point), and an XOR that is applied twice undoes itself. One step of
RL leaves most elements of a 16-bit dtype as they were (Fireworks, "Frontier RL Is Cheaper Than You Think": over 98 % at
production learning rates), so the rest is written as gaps between changed places and new bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard

from cadenza.core.errors import CorruptArtifact

LEVEL = (
    1  # of zstd: gaps and bits shrink by a third; higher levels cost several times as much for a few per cent
)
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Bits:
    """One tensor. ``dtype``: as torch names it ("bfloat16"). ``values``: the bits as unsigned integers of that size."""

    dtype: str
    values: np.ndarray

    def checksum(self) -> str:
        """xxh3 (16 hex digits) of the bits."""
        return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.values).data)


State = Mapping[str, Bits]


def nbytes(state: State) -> int:
    """Bytes of all tensors."""
    return sum(bits.values.nbytes for bits in state.values())


def encode(new: State, old: State | None) -> bytes:
    """The payload that turns ``old`` into ``new``; without ``old`` it holds ``new`` whole.

    Raises:
        ValueError: ``old`` has other tensors, shapes or dtypes.
    """
    if old is not None and not _alike(old, new):
        raise ValueError("the weights have other tensors than those before")
    rows: list[dict[str, Any]] = []
    buffers: list[bytes] = []
    for name, bits in new.items():
        row: dict[str, Any] = {
            "name": name,
            "dtype": bits.dtype,
            "shape": list(bits.values.shape),
            "size": bits.values.itemsize,
            "xxh3": bits.checksum(),
        }
        sparse = None if old is None else _sparse(old[name].values, bits.values)
        if sparse is None:
            buffers.append(_planes(bits.values))
        else:
            gaps, values = sparse
            row["changed"], row["gap_size"] = len(values), gaps.itemsize
            buffers += [_planes(gaps), _planes(values)]
        rows.append(row)
    head = json.dumps(rows, separators=(",", ":")).encode()
    body = b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *buffers])
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(body)


def decode(payload: bytes, old: State | None) -> dict[str, Bits]:
    """The weights that ``payload`` makes of ``old``, which stays as it is.

    Raises:
        CorruptArtifact: the payload is torn, is no payload, or makes other bits than were encoded: it is damaged, or
            ``old`` is not what it was made for.
    """
    try:
        body = memoryview(zstandard.ZstdDecompressor().decompress(payload))
        length = int.from_bytes(body[:_LENGTH_BYTES], "little")
        place = _LENGTH_BYTES + length
        rows = json.loads(bytes(body[_LENGTH_BYTES:place]))
        state: dict[str, Bits] = {}
        for row in rows:
            values, place = _read(row, body, place, None if old is None else old.get(row["name"]))
            state[row["name"]] = Bits(row["dtype"], values)
            if state[row["name"]].checksum() != row["xxh3"]:
                raise CorruptArtifact(f"tensor {row['name']} of a weight delta has other bits", MEND)
    except (zstandard.ZstdError, ValueError, LookupError, TypeError) as error:
        raise CorruptArtifact(f"a weight delta cannot be read: {error}", MEND) from None
    return state


MEND = "begin at an anchor, or publish the weights whole"


def _read(row: dict[str, Any], body: memoryview, place: int, old: Bits | None) -> tuple[np.ndarray, int]:
    """One tensor, and where the next one's bytes begin."""
    kind, shape = np.dtype(f"<u{row['size']}"), tuple(row["shape"])
    if "changed" not in row:
        values, place = _unplanes(body, place, math.prod(shape), kind)
        return values.reshape(shape), place
    gaps, place = _unplanes(body, place, row["changed"], np.dtype(f"<u{row['gap_size']}"))
    values, place = _unplanes(body, place, row["changed"], kind)
    if old is None or old.values.shape != shape or old.values.dtype != kind:
        raise CorruptArtifact(f"tensor {row['name']} of a weight delta has nothing to change", MEND)
    out = old.values.copy()
    out.reshape(-1)[np.cumsum(gaps.astype(np.int64) + 1) - 1] = values
    return out, place


def _sparse(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(gaps between changed places, their new bits), or None when the whole tensor is no larger."""
    at = np.flatnonzero(old.reshape(-1) != new.reshape(-1))
    gaps = np.diff(at, prepend=-1) - 1
    kind = np.min_scalar_type(int(gaps.max()) if len(gaps) else 0)
    if len(at) * (kind.itemsize + new.itemsize) >= new.nbytes:
        return None
    return gaps.astype(kind), new.reshape(-1)[at]


def _planes(values: np.ndarray) -> bytes:
    """The bytes, all first ones, then all second ones: the upper ones of floats are alike and compress better so."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(np.uint8).reshape(-1, flat.itemsize).T.tobytes()


def _unplanes(body: memoryview, place: int, count: int, kind: np.dtype) -> tuple[np.ndarray, int]:
    end = place + count * kind.itemsize
    raw = np.frombuffer(body[place:end], np.uint8)
    if len(raw) != count * kind.itemsize:
        raise ValueError("it ends too early")
    return raw.reshape(kind.itemsize, count).T.copy().reshape(-1).view(kind), end


def _alike(old: State, new: State) -> bool:
    return old.keys() == new.keys() and all(
        old[n].dtype == b.dtype and old[n].values.shape == b.values.shape for n, b in new.items()
    )
