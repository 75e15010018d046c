"""The chain of weights in an object store: what lies where, and how one link vouches for the one before.

    PREFIX/00000012.json            Link, written after its payload
    PREFIX/00000012-<sha256>.bin    its payload: the weights whole (an anchor), or what changed since the parent
    PREFIX/head.json                the newest version, written last

A version may be published again with other weights, when a run goes on from an older checkpoint. Its payload then has
another name and its chain hash another value, so nobody can mix the two.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from cadenza.core.errors import CorruptArtifact
from cadenza.core.store import ObjectStore

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Link:
    """One version. ``parent``: the version it changes, None for an anchor. ``parent_chain``: that version's ``chain``.

    ``chain``: sha256 over the parent's, the version and the payload, first 32 hex digits: equal when everything since
    the anchor is equal. ``digest``: of the weights, as the engine echoes it. ``payload``: sha256 of the payload.
    ``bytes`` of the payload and ``full_bytes`` of the weights.
    """

    version: int
    parent: int | None
    parent_chain: str
    chain: str
    digest: str
    payload: str
    bytes: int
    full_bytes: int

    @property
    def is_anchor(self) -> bool:
        return self.parent is None


def link_for(version: int, parent: Link | None, payload: bytes, digest: str, full_bytes: int) -> Link:
    """The link of a payload that changes ``parent``, or is an anchor without one."""
    before = parent.chain if parent else ""
    content = hashlib.sha256(payload).hexdigest()
    chain = hashlib.sha256(f"{before}/{version}/{content}".encode()).hexdigest()[:32]
    return Link(
        version, parent.version if parent else None, before, chain, digest, content, len(payload), full_bytes
    )


@dataclass(frozen=True, slots=True)
class ChainAddress:
    """Where a chain lies: what trainer and engines are told, on whatever machine they run.

    ``store``: a folder or an fsspec URL that all of them reach. The rest is the publisher's, see there.
    """

    store: str
    prefix: str = "weights"
    anchor_every: int = 25
    keep_anchors: int = 2


class Chain:
    """Reads and writes the objects of one chain. Errors are the store's."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store, self.prefix = store, prefix.strip("/")

    def write(self, link: Link, payload: bytes) -> None:
        """Payload, link, head, in this order: what the head names is whole."""
        self.store.put(self._payload(link), payload)
        self.store.put(self._link(link.version), _json({"format": FORMAT, **asdict(link)}))
        self.store.put(self._head(), _json({"format": FORMAT, "version": link.version}))

    def head(self) -> int | None:
        """The newest version, None before the first."""
        if not self.store.exists(self._head()):
            return None
        version = self._table(self._head()).get("version")
        if not isinstance(version, int):
            raise CorruptArtifact(f"{self._head()} in {self.store.address} names no version", MEND)
        return version

    def forget_head(self) -> None:
        """There is no newest version until the next is written."""
        self.store.delete(self._head())

    def link(self, version: int) -> Link:
        """Raises MissingArtifact when it was never published or has been dropped, CorruptArtifact when it is torn."""
        key = self._link(version)
        table = self._table(key)
        try:
            return Link(**{field.name: table[field.name] for field in fields(Link)})
        except LookupError:
            raise CorruptArtifact(f"{key} in {self.store.address} is no link of a chain", MEND) from None

    def payload(self, link: Link) -> bytes:
        """The payload, checked. Raises MissingArtifact, CorruptArtifact."""
        return self.store.get(self._payload(link), link.payload)

    def versions(self) -> list[int]:
        """Every version whose link is there, ascending."""
        names = [key.rsplit("/", 1)[-1] for key in self.store.keys(f"{self.prefix}/")]
        return sorted(int(n[:8]) for n in names if len(n) == 13 and n.endswith(".json") and n[:8].isdigit())

    def drop(self, link: Link, replaced: bool = False) -> None:
        """Removes a version: first the link, so that nobody is sent to a payload that is gone. ``replaced``: another
        link of this version was written over it, and stays."""
        if not replaced:
            self.store.delete(self._link(link.version))
        self.store.delete(self._payload(link))

    def _table(self, key: str) -> dict[str, Any]:
        try:
            table = json.loads(self.store.get(key))
        except ValueError:
            table = None
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise CorruptArtifact(f"{key} in {self.store.address} is not of this version", MEND)
        return table

    def _link(self, version: int) -> str:
        return f"{self.prefix}/{version:08}.json"

    def _payload(self, link: Link) -> str:
        return f"{self.prefix}/{link.version:08}-{link.payload}.bin"

    def _head(self) -> str:
        return f"{self.prefix}/head.json"


MEND = "publish the weights whole (an anchor), or remove the chain and begin anew"


def path_to(chain: Chain, version: int, known: Link | None) -> list[Link]:
    """The links to apply, oldest first: none when ``known`` is that version, from ``known`` where the way back leads to
    it, or else from an anchor.

    Raises:
        MissingArtifact: a link on the way was dropped. CorruptArtifact: one is torn, or does not fit its parent.
    """
    link = chain.link(version)
    if known is not None and link.chain == known.chain:
        return []
    path = [link]
    while not link.is_anchor:
        if known is not None and (link.parent, link.parent_chain) == (known.version, known.chain):
            return path[::-1]
        assert link.parent is not None
        before = chain.link(link.parent)
        if before.chain != link.parent_chain or before.version >= link.version:
            raise CorruptArtifact(f"version {link.version} does not follow version {before.version}", MEND)
        link = before
        path.append(link)
    return path[::-1]


def _json(table: dict[str, Any]) -> bytes:
    return (json.dumps(table) + "\n").encode()
