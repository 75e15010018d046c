"""Text becomes ids exactly once: tokenizer, chat renderer, tool-call syntax, and the seam to what samples."""

from cadenza.tokens.actions import Action, BrokenCall, Call, Final, Parsed, Summary
from cadenza.tokens.renderer import CompactRenderer
from cadenza.tokens.session import Sampled, Sampling, SessionLost, TokenSession
from cadenza.tokens.tokenizer import SPECIALS, Tokenizer

__all__ = [
    "SPECIALS", "Action", "BrokenCall", "Call", "CompactRenderer", "Final", "Parsed", "Sampled", "Sampling",
    "SessionLost", "Summary", "TokenSession", "Tokenizer",
]  # fmt: skip
