"""Which corpus or split a generated function may appear in: decided by a hash of its specification.

The rule has no seed: a function's name, parameters and docstrings hash to one of 100 buckets, and each bucket belongs
to one owner for ever. So the pretraining corpus and the splits cannot share a function, however many are drawn, with
whatever seeds, and a base model shipped long ago stays clean of every split drawn later. A bug never changes the
specification, so a buggy function is in the same bucket as its correct form.
"""

from __future__ import annotations

from collections.abc import Callable

BUCKETS = 100
PARTITION: dict[str, range] = {
    "corpus": range(40),
    "demo": range(40, 55),
    "train": range(55, 78),
    "val": range(78, 82),
    "heldout": range(82, 92),
    "heldout_hard": range(92, 100),
}


def owner_of(digest: int) -> str:
    """The corpus or split that owns a spec digest."""
    bucket = digest % BUCKETS
    return next(name for name, buckets in PARTITION.items() if bucket in buckets)


def owned_by(name: str) -> Callable[[int], bool]:
    """A predicate on spec digests.

    Raises:
        KeyError: no such corpus or split.
    """
    buckets = PARTITION[name]
    return lambda digest: digest % BUCKETS in buckets
