"""What the base model reads: Python source of the machine, generated clean modules, and generated repairs.

The generated part comes from the content partition reserved for the corpus and leaves out the unseen bug families.
They hold no tool syntax and no agent transcript. Every step's batch depends on (seed, step) alone.
"""

from __future__ import annotations

import itertools

import numpy as np

from cadenza.tasks.corpus import Exercise, clean_modules, commit_documents, reading_documents
from cadenza.tokens.tokenizer import Tokenizer
from cadenza.training.config import MixtureConfig
from cadenza.training.corpus import stream_rows

Sequence = tuple[np.ndarray, np.ndarray]  # ids, loss weights


def _whole(text: str, tokenizer: Tokenizer) -> Sequence:
    ids = np.array(
        [tokenizer.id("<|bos|>"), *tokenizer.encode(text), tokenizer.id("<|end|>")], dtype=np.uint16
    )
    return ids, np.ones(len(ids), dtype=np.float32)


def _answered(exercise: Exercise, tokenizer: Tokenizer, config: MixtureConfig) -> Sequence:
    """Parts are encoded apart, as an agent's turns are."""
    of_role = {"given": config.listing_weight, "wrong": 0.0, "answer": config.answer_weight}
    ids, weight = [tokenizer.id("<|bos|>")], [0.0]
    for role, text in exercise.parts:
        part = tokenizer.encode(text)
        ids += part
        weight += [of_role[role]] * len(part)
    ids.append(tokenizer.id("<|end|>"))
    weight.append(of_role[exercise.parts[-1][0]])
    return np.array(ids, dtype=np.uint16), np.array(weight, dtype=np.float32)


def mixture(
    step: int, seed: int, source: np.ndarray, tokenizer: Tokenizer, config: MixtureConfig
) -> list[Sequence]:
    """The sequences of one step: about ``tokens_per_step`` tokens, windows of source first.

    ``source``: the token stream of Python files; each step reads its next windows, wrapping at the end.
    """
    windows_per_step = config.source_share * config.tokens_per_step / config.source_length
    first, last = int(step * windows_per_step), int((step + 1) * windows_per_step)
    out = stream_rows(source, first, last - first, config.source_length)
    reading_share = 1 - config.source_share - config.clean_share - config.commit_share
    generated = (
        (clean_modules, config.clean_share, lambda text: _whole(text, tokenizer)),
        (commit_documents, config.commit_share, lambda exercise: _answered(exercise, tokenizer, config)),
        (reading_documents, reading_share, lambda exercise: _answered(exercise, tokenizer, config)),
    )
    budget = 0.0
    for documents, share, weighted in generated:
        budget += config.tokens_per_step * share
        for text in documents(seed * 1_000_003 + step):
            if budget <= 0:
                break
            out.append(weighted(text))
            budget -= len(out[-1][0])
    return [(ids[: config.source_length], weight[: config.source_length]) for ids, weight in out]


def tokenizer_texts(source_documents: list[str], seed: int, documents: int) -> list[str]:
    """What the tokenizer is trained on: as many generated texts of either kind as source files."""
    clean = itertools.islice(clean_modules(seed), documents)
    repairs = itertools.islice(commit_documents(seed), documents)
    reading = itertools.islice(reading_documents(seed), documents // 2)
    return [*source_documents, *clean, *(e.text for e in repairs), *(e.text for e in reading)]
