"""Stage ``mtp``: multi-token prediction heads, trained from scratch by self-distillation on a trunk that stands still."""

from __future__ import annotations

import itertools

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.errors import MissingArtifact
from cadenza.core.extras import TRAIN
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.training.config import MixtureConfig, OptimizerConfig


class MtpConfig(StrictConfig):
    """``heads``: tokens guessed beyond the next one. ``width``: hidden width of a head. ``middle``: the trunk is the one
    that the input kept in the middle of its training (its ``keep_middle``), so that the heads suit a trunk that goes on
    learning, and not just this one. The text is that of continued pretraining: ``replay_share`` of each step's tokens is
    the base's generated text."""

    heads: int = Field(default=2, gt=0)
    width: int = Field(default=256, gt=0)
    middle: bool = True
    steps: int = Field(default=150, gt=0)
    source_tokens: int = Field(default=600_000, gt=0)
    source_documents: int = Field(default=400, gt=0)
    held_out_tokens: int = Field(default=16_384, gt=0)
    tokens_per_step: int = Field(default=4096, gt=0)
    tokens_per_microbatch: int = Field(default=4096, gt=0)
    replay_share: float = Field(default=0.75, ge=0, le=1)
    row_length: int = Field(default=512, gt=1)
    threads: int = Field(default=2, gt=0)
    evaluate_every: int = Field(default=25, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig(adam_lr=3e-3, muon_lr=0.02, warmup_steps=5)


class Mtp(Stage[MtpConfig]):
    """Artifact: the trunk with trained heads, a model directory. Figures: per head, how often its likeliest token is the
    trunk's on held-out source."""

    Config = MtpConfig
    packages = TRAIN
    inputs = ("model",)
    resumable = True

    def run(self, context: StageContext) -> Figures:
        from cadenza.model.hf import load_model, with_mtp_heads
        from cadenza.pipelines.lm_loop import LMRun, save_with_tokenizer, use_bf16
        from cadenza.tokens.tokenizer import Tokenizer
        from cadenza.training.corpus import python_documents, source_directories, stream_rows, token_stream
        from cadenza.training.lm import microbatches
        from cadenza.training.mtp import agreement, frozen_trunk_loss
        from cadenza.training.pretraining import mixture

        config, seed = self.config, context.seed_for("mtp")
        trunk = context.input("model") / "middle" if config.middle else context.input("model")
        if not trunk.is_dir():
            raise MissingArtifact(
                f"the model of stage {context.name!r} has no weights from the middle of its training",
                "set its keep_middle above 0, or STAGE.middle to false",
            )
        tokenizer = Tokenizer.load(trunk)
        model = with_mtp_heads(load_model(trunk), config.heads, config.width, seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("mtp."))
        directories = source_directories()
        documents = itertools.islice(python_documents(directories, held_out=False), config.source_documents)
        source = token_stream(documents, tokenizer, config.source_tokens)
        held_stream = token_stream(
            python_documents(directories, held_out=True), tokenizer, config.held_out_tokens
        )
        held = microbatches(
            stream_rows(held_stream, 0, len(held_stream) // config.row_length, config.row_length),
            config.tokens_per_microbatch,
        )
        count = max(1, round(config.tokens_per_step * (1 - config.replay_share) / config.row_length))
        replay = MixtureConfig(
            tokens_per_step=max(1, round(config.tokens_per_step * config.replay_share)), source_share=0.0
        )

        def batches(step: int):
            sequences = stream_rows(source, step * count, count, config.row_length)
            if config.replay_share > 0:
                sequences += mixture(step, seed, source, tokenizer, replay)
            return microbatches(sequences, config.tokens_per_microbatch)

        def shares() -> dict[str, float]:
            found = agreement(model, held, use_bf16())
            return {f"agreement_{k}": share for k, share in enumerate(found, 1)}

        run = LMRun(
            context, model, config.optimizer, batches, config.steps, threads=config.threads,
            loss=frozen_trunk_loss, shown="divergence",
        )  # fmt: skip
        seconds = run.run(config.evaluate_every, lambda _: shares())
        save_with_tokenizer(model, tokenizer, context.out)
        run.finish()
        return {**shares(), "tokens": run.tokens, "seconds": seconds}
