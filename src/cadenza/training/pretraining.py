"""What the base model reads: Python source of the machine, generated clean modules, and generated repairs.

The generated part comes from the content partition reserved for the corpus and leaves out the unseen bug families;
it holds no tool syntax and no agent transcript. Every step's batch depends on (seed, step) alone.
"""

from __future__ import annotations

import itertools

import numpy as np

from cadenza.tasks.corpus import clean_modules, commit_documents
from cadenza.tokens.tokenizer import Tokenizer
from cadenza.training.config import MixtureConfig
from cadenza.training.corpus import stream_rows

Sequence = tuple[np.ndarray, np.ndarray]  # ids, loss weights


def _whole(text: str, tokenizer: Tokenizer) -> Sequence:
    ids = np.array(
        [tokenizer.id("<|bos|>"), *tokenizer.encode(text), tokenizer.id("<|end|>")], dtype=np.uint16
    )
    return ids, np.ones(len(ids), dtype=np.float32)


def _repair(text: str, tokenizer: Tokenizer, config: MixtureConfig) -> Sequence:
    listing, _, told = text.partition("\n\n")  # a numbered listing has no empty line
    message, _, answer = told.partition("\n")
    head = [tokenizer.id("<|bos|>"), *tokenizer.encode(f"{listing}\n\n{message}\n")]
    tail = [*tokenizer.encode(answer), tokenizer.id("<|end|>")]
    ids = np.array(head + tail, dtype=np.uint16)
    weight = np.full(len(ids), config.listing_weight, dtype=np.float32)
    weight[len(head) :] = config.answer_weight
    return ids, weight


def mixture(
    step: int, seed: int, source: np.ndarray, tokenizer: Tokenizer, config: MixtureConfig
) -> list[Sequence]:
    """The sequences of one step: about ``tokens_per_step`` tokens, windows of source first.

    ``source``: the token stream of Python files; each step reads its next windows, wrapping at the end.
    """
    windows_per_step = config.source_share * config.tokens_per_step / config.source_length
    first, last = int(step * windows_per_step), int((step + 1) * windows_per_step)
    out = stream_rows(source, first, last - first, config.source_length)
    budget = config.tokens_per_step * config.clean_share
    for text in clean_modules(seed * 1_000_003 + step):
        if budget <= 0:
            break
        out.append(_whole(text, tokenizer))
        budget -= len(out[-1][0])
    budget += config.tokens_per_step * (1 - config.source_share - config.clean_share)
    for text in commit_documents(seed * 1_000_003 + step):
        if budget <= 0:
            break
        out.append(_repair(text, tokenizer, config))
        budget -= len(out[-1][0])
    return [(ids[: config.source_length], weight[: config.source_length]) for ids, weight in out]


def tokenizer_texts(source_documents: list[str], seed: int, documents: int) -> list[str]:
    """What the tokenizer is trained on: as many generated texts of either kind as source files."""
    clean = itertools.islice(clean_modules(seed), documents)
    repairs = itertools.islice(commit_documents(seed), documents)
    return [*source_documents, *clean, *repairs]
