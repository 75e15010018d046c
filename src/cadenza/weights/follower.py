"""The serving end of the chain: from the version it has to a newer one, bit for bit, or not at all."""

from __future__ import annotations

from cadenza.core.deadlines import wait_until
from cadenza.core.errors import CorruptArtifact, MissingArtifact
from cadenza.core.store import ObjectStore
from cadenza.weights.chain import Chain, ChainAddress, Link, path_to
from cadenza.weights.delta import State, decode


class Follower:
    """Rebuilds published weights. It needs no word from the trainer, and one that joins late begins at an anchor.

    Attributes:
        link: the version it has, None before the first ``advance``.
        state: its weights; a new object at each version, so that who still reads the old one is not disturbed.
        fallbacks: how often its own weights or a delta were no good and it began at an anchor.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._chain = Chain(store, prefix)
        self.link: Link | None = None
        self.state: State | None = None
        self.fallbacks = 0

    @classmethod
    def at(cls, address: ChainAddress) -> Follower:
        return cls(ObjectStore(address.store), address.prefix)

    def wait_for(self, version: int, deadline_s: float) -> Link:
        """Goes to the newest version as soon as that is ``version`` or a later one. Raises DeadlineExceeded, or what
        ``advance`` raises."""

        def there() -> bool:
            head = self._chain.head()
            return head is not None and head >= version

        wait_until(
            there,
            deadline_s,
            f"version {version} of the weights at {self._chain.prefix} in {self._chain.store.address}",
        )
        return self.advance()

    def advance(self, version: int | None = None) -> Link:
        """Goes to a version, by default the newest, and returns its link. When it raises, nothing has changed.

        Raises:
            MissingArtifact: nothing was published, or not this version.
            CorruptArtifact: a payload is damaged and no anchor lies after it.
        """
        if version is None:
            version = self._chain.head()
            if version is None:
                raise MissingArtifact(
                    f"no weights at {self._chain.prefix} in {self._chain.store.address}", "publish some first"
                )
        try:
            self._go(path_to(self._chain, version, self.link), self.state)
        except (CorruptArtifact, MissingArtifact):
            if self.link is None:
                raise
            self._go(path_to(self._chain, version, None), None)
            self.fallbacks += 1
        assert self.link is not None
        return self.link

    def _go(self, path: list[Link], state: State | None) -> None:
        for link in path:
            state = decode(self._chain.payload(link), None if link.is_anchor else state)
        if path:
            self.link, self.state = path[-1], state
