"""How new weights travel from the trainer to whoever serves them: a chain of deltas in an object store.

Start with ``Publisher`` and ``Follower``.
"""

from cadenza.weights.chain import ChainAddress, Link
from cadenza.weights.delta import Bits, State
from cadenza.weights.follower import Follower
from cadenza.weights.publisher import Publisher

__all__ = ["Bits", "ChainAddress", "Follower", "Link", "Publisher", "State"]
