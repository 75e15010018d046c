"""Text becomes ids exactly once: tokenizer, chat renderer, tool-call syntax."""

from cadenza.tokens.actions import Action, BrokenCall, Call, Final, Parsed
from cadenza.tokens.renderer import CompactRenderer
from cadenza.tokens.tokenizer import SPECIALS, Tokenizer

__all__ = ["SPECIALS", "Action", "BrokenCall", "Call", "CompactRenderer", "Final", "Parsed", "Tokenizer"]
