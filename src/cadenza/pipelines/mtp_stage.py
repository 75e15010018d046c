"""Stage ``mtp``: multi-token prediction heads, trained by self-distillation on a trunk that stands still."""

from __future__ import annotations

from pydantic import Field

from cadenza.core.errors import MissingArtifact
from cadenza.core.extras import TRAIN
from cadenza.pipelines.source_text import SourceTextConfig, source_text
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.training.config import OptimizerConfig


class MtpConfig(SourceTextConfig):
    """``heads``: tokens guessed beyond the next one. ``width``: hidden width of a head. ``middle``: the trunk is that
    which the input kept from the middle of its training (its ``keep_middle``), so that the heads suit a trunk that goes
    on learning, and not just this one. ``steps``: of the optimizer. ``threads``: cores. ``evaluate_every``: steps from
    one look at held-out source to the next. ``optimizer``: its rates."""

    heads: int = Field(default=2, gt=0)
    width: int = Field(default=256, gt=0)
    middle: bool = True
    steps: int = Field(default=150, gt=0)
    threads: int = Field(default=2, gt=0)
    evaluate_every: int = Field(default=25, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig(adam_lr=3e-3, muon_lr=0.02, warmup_steps=5)


class Mtp(Stage[MtpConfig]):
    """Artifact: the trunk with trained heads, a model directory. Figures: per head, how often its likeliest token is
    the trunk's on held-out source."""

    Config = MtpConfig
    packages = TRAIN
    inputs = ("model",)
    resumable = True

    def run(self, context: StageContext) -> Figures:
        from cadenza.model.hf import load_model, with_mtp_heads
        from cadenza.pipelines.lm_loop import LMRun, save_with_tokenizer, use_bf16
        from cadenza.tokens.tokenizer import Tokenizer
        from cadenza.training.mtp import agreement, frozen_trunk_loss

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
        batches, held = source_text(config, tokenizer, seed)

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
