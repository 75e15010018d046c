"""What continued pretraining reads: Python source of this machine, mixed with the base's generated text."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from cadenza.core.config import StrictConfig
from cadenza.core.errors import MissingArtifact
from cadenza.training.config import MixtureConfig

if TYPE_CHECKING:
    from cadenza.tokens.tokenizer import Tokenizer
    from cadenza.training.lm import Rows


class SourceTextConfig(StrictConfig):
    """``source_tokens``: of Python source, at most; ``source_documents``: files of it, at most. ``row_length``: tokens
    of a row. ``held_out_tokens``: of other files, for measuring. ``tokens_per_step``: of one optimizer step;
    ``tokens_per_microbatch``: of one pass through the model. ``replay_share``: of each step's tokens (0..1) that repeat
    the base's generated text, so that it is not forgotten."""

    source_tokens: int = Field(default=1_500_000, gt=0)
    source_documents: int = Field(default=700, gt=0)
    held_out_tokens: int = Field(default=32_768, gt=0)
    tokens_per_step: int = Field(default=4096, gt=0)
    tokens_per_microbatch: int = Field(default=4096, gt=0)
    replay_share: float = Field(default=0.5, ge=0, le=1)
    row_length: int = Field(default=512, gt=1)

    @model_validator(mode="after")
    def _a_row_is_held_out(self) -> SourceTextConfig:
        if self.held_out_tokens < self.row_length:
            raise ValueError(
                f"held_out_tokens = {self.held_out_tokens} is less than a row of {self.row_length}"
            )
        return self


def source_text(
    config: SourceTextConfig, tokenizer: Tokenizer, seed: int
) -> tuple[Callable[[int], list[Rows]], list[Rows]]:
    """(the batch of a step, held-out batches). A batch depends on nothing but the step."""
    from cadenza.training.corpus import python_documents, source_directories, stream_rows, token_stream
    from cadenza.training.lm import microbatches
    from cadenza.training.pretraining import mixture

    directories, length = source_directories(), config.row_length
    documents = itertools.islice(python_documents(directories, held_out=False), config.source_documents)
    source = token_stream(documents, tokenizer, config.source_tokens)
    kept = token_stream(python_documents(directories, held_out=True), tokenizer, config.held_out_tokens)
    for part, wanted in ((source, "source_tokens"), (kept, "held_out_tokens")):
        if len(part) < length:
            raise MissingArtifact(
                f"the Python files of this machine give {len(part)} tokens for {wanted}, less than a row of {length}",
                "lower row_length, or raise source_documents",
            )
    held = microbatches(stream_rows(kept, 0, len(kept) // length, length), config.tokens_per_microbatch)
    count = max(1, round(config.tokens_per_step * (1 - config.replay_share) / length))
    replay = MixtureConfig(
        tokens_per_step=max(1, round(config.tokens_per_step * config.replay_share)), source_share=0.0
    )

    def batches(step: int) -> list[Rows]:
        sequences = stream_rows(source, step * count, count, length)
        if config.replay_share > 0:
            sequences += mixture(step, seed, source, tokenizer, replay)
        return microbatches(sequences, config.tokens_per_microbatch)

    return batches, held
