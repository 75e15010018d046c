"""The trainer's end of the chain: compression and upload in a thread of their own, so that training never waits."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from cadenza.core.store import ObjectStore
from cadenza.weights.chain import Chain, ChainAddress, Link, link_for
from cadenza.weights.delta import State, encode, nbytes


@dataclass
class _Order:
    version: int
    state: State
    digest: str
    done: Future[Link]


class Publisher:
    """Publishes versions, each higher than the one before, to ``prefix`` of a store. Close it, or use ``with``.

    A chain has one publisher at a time: a new one takes it over, and until its first version is stored the chain has no
    newest one.

    Args:
        anchor_every: versions from one whole copy of the weights to the next; it is also how many deltas who joins
            late has to apply at most. A delta that is no smaller than the weights becomes an anchor too.
        keep_anchors: anchors that stay, with what follows them; older versions are dropped.
    """

    def __init__(
        self, store: ObjectStore, prefix: str, anchor_every: int = 25, keep_anchors: int = 2
    ) -> None:
        if anchor_every < 1 or keep_anchors < 1:
            raise ValueError("anchor_every and keep_anchors are at least 1")
        self._chain = Chain(store, prefix)
        # Or a follower would be sent to what an earlier process came to after the checkpoint this one goes on from.
        self._chain.forget_head()
        self._anchor_every, self._keep = anchor_every, keep_anchors
        self._previous: tuple[Link, State] | None = None  # None: the next one is an anchor
        self._since_anchor = 0
        self._newest = -1
        self._waiting: _Order | None = None
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weights-publisher", daemon=True)
        self._thread.start()

    @classmethod
    def at(cls, address: ChainAddress) -> Publisher:
        return cls(ObjectStore(address.store), address.prefix, address.anchor_every, address.keep_anchors)

    def publish(self, version: int, state: State, digest: str) -> Future[Link]:
        """Hands over a version and returns at once; the future gives its link when followers can have it.

        ``state`` belongs to the publisher from now on. A version that is overtaken before its turn is never stored, and
        its future gives the link of the one that overtook it. The future raises what the store raises (a full disk,
        for example); the version after that is published whole.
        """
        order = _Order(version, state, digest, Future())
        with self._wake:
            if self._closed:
                raise RuntimeError("the publisher is closed")
            if version <= self._newest:
                raise ValueError(f"version {version} comes after {self._newest}; a new publisher takes over")
            self._newest = version
            overtaken, self._waiting = self._waiting, order
            self._wake.notify()
        if overtaken is not None:
            order.done.add_done_callback(lambda done: _pass_on(done, overtaken.done))
        return order.done

    def anchor_next(self) -> None:
        """The next version is published whole, for a follower who has lost the chain."""
        with self._wake:
            self._since_anchor = self._anchor_every

    def close(self) -> None:
        """Publishes what waits and ends the thread. May be called twice."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._waiting is None and not self._closed:
                    self._wake.wait()
                order, self._waiting = self._waiting, None
                whole = self._since_anchor >= self._anchor_every
            if order is None:
                return
            try:
                order.done.set_result(self._store(order, whole))
            except BaseException as error:
                self._previous = None  # what the store holds now is not known
                order.done.set_exception(error)

    def _store(self, order: _Order, whole: bool) -> Link:
        full = nbytes(order.state)
        parent = None if whole or self._previous is None else self._previous[0]
        payload = encode(order.state, self._previous[1] if parent and self._previous else None)
        if parent is not None and len(payload) >= full:
            parent, payload = None, encode(order.state, None)
        link = link_for(order.version, parent, payload, order.digest, full)
        # Left by an earlier process that came further than the checkpoint from which this one goes on.
        stale = [] if self._previous else self._links(since=order.version)
        self._chain.write(link, payload)
        for other in stale:
            if other != link:
                self._chain.drop(other, replaced=other.version == link.version)
        self._previous = (link, order.state)
        with self._wake:
            self._since_anchor = 1 if link.is_anchor else self._since_anchor + 1
        if link.is_anchor:
            self._drop_old()
        return link

    def _links(self, since: int = 0) -> list[Link]:
        return [self._chain.link(version) for version in self._chain.versions() if version >= since]

    def _drop_old(self) -> None:
        links = self._links()
        anchors = [link.version for link in links if link.is_anchor]
        if len(anchors) > self._keep:
            for link in links:
                if link.version < anchors[-self._keep]:
                    self._chain.drop(link)


def _pass_on(done: Future[Link], to: Future[Link]) -> None:
    error = done.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())
