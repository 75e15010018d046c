"""Stage ``cpt``: continued pretraining of the base on the machine's Python source, with held-out perplexity."""

from __future__ import annotations

import itertools
import math

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.extras import TRAIN
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.training.config import MixtureConfig, OptimizerConfig


class CptConfig(StrictConfig):
    """``replay_share`` of each step's tokens repeats the base's generated text, so that it is not forgotten."""

    steps: int = Field(default=150, gt=0)
    source_tokens: int = Field(default=1_500_000, gt=0)
    source_documents: int = Field(default=700, gt=0)
    held_out_tokens: int = Field(default=32_768, gt=0)
    tokens_per_step: int = Field(default=4096, gt=0)
    tokens_per_microbatch: int = Field(default=4096, gt=0)
    replay_share: float = Field(default=0.5, ge=0, le=1)
    row_length: int = Field(default=512, gt=1)
    threads: int = Field(default=2, gt=0)
    evaluate_every: int = Field(default=25, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig(adam_lr=1e-3, muon_lr=0.004, warmup_steps=10)


class Cpt(Stage[CptConfig]):
    """Artifact: a model directory. Figures: perplexity of held-out source before and after."""

    Config = CptConfig
    packages = TRAIN
    inputs = ("base",)
    resumable = True

    def run(self, context: StageContext) -> Figures:
        from cadenza.model.hf import load_model
        from cadenza.pipelines.lm_loop import LMRun, save_with_tokenizer, use_bf16
        from cadenza.tokens.tokenizer import Tokenizer
        from cadenza.training.corpus import python_documents, source_directories, stream_rows, token_stream
        from cadenza.training.lm import mean_nll, microbatches
        from cadenza.training.pretraining import mixture

        config, seed = self.config, context.seed_for("cpt")
        tokenizer = Tokenizer.load(context.input("base"))
        model = load_model(context.input("base"))
        directories = source_directories()
        documents = itertools.islice(python_documents(directories, held_out=False), config.source_documents)
        source = token_stream(documents, tokenizer, config.source_tokens)
        held_stream = token_stream(
            python_documents(directories, held_out=True), tokenizer, config.held_out_tokens
        )
        rows = len(held_stream) // config.row_length
        held = microbatches(
            stream_rows(held_stream, 0, rows, config.row_length), config.tokens_per_microbatch
        )
        source_tokens = config.tokens_per_step * (1 - config.replay_share)
        rows_per_step = max(1, round(source_tokens / config.row_length))
        replay = MixtureConfig(
            tokens_per_step=max(1, round(config.tokens_per_step * config.replay_share)), source_share=0.0
        )

        def batches(step: int):
            sequences = stream_rows(source, step * rows_per_step, rows_per_step, config.row_length)
            if config.replay_share > 0:
                sequences += mixture(step, seed, source, tokenizer, replay)
            return microbatches(sequences, config.tokens_per_microbatch)

        def perplexity() -> float:
            return math.exp(mean_nll(model, held, use_bf16()))

        optimizer = config.optimizer
        run = LMRun(context, model, optimizer, batches, config.steps, threads=config.threads)
        before = perplexity() if run.state.step == 0 else float("nan")
        seconds = run.run(config.evaluate_every, lambda _: {"heldout_perplexity": perplexity()})
        save_with_tokenizer(model, tokenizer, context.out)
        run.finish()
        figures: Figures = {"perplexity_after": perplexity(), "tokens": run.tokens, "seconds": seconds}
        if math.isfinite(before):
            figures["perplexity_before"] = before
        return figures
