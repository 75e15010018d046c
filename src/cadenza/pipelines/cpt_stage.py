"""Stage ``cpt``: continued pretraining of the base on the machine's Python source, with held-out perplexity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from cadenza.core.errors import ConfigError
from cadenza.core.extras import TRAIN
from cadenza.core.files import read_json, write_json
from cadenza.pipelines.source_text import SourceTextConfig, source_text
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.training.config import OptimizerConfig

if TYPE_CHECKING:
    from cadenza.model.transformer import PolicyModel


class CptConfig(SourceTextConfig):
    """``stretch``: factor by which rotary positions are stretched before the first step, for rows longer than the model
    was trained on. ``mtp_weight``: of the loss of the MTP heads, which are trained along when the model has some.
    ``keep_middle``: also keep the weights at this share of the steps, in ``middle/`` (0: not): a trunk for heads that
    are to suit what comes after it. ``steps``: of the optimizer. ``threads``: cores. ``evaluate_every``: steps from one
    look at held-out source to the next. ``optimizer``: its rates.
    """

    steps: int = Field(default=150, gt=0)
    stretch: float = Field(default=1.0, ge=1)
    mtp_weight: float = Field(default=0.1, ge=0)
    keep_middle: float = Field(default=0.0, ge=0, lt=1)
    threads: int = Field(default=2, gt=0)
    evaluate_every: int = Field(default=25, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig(adam_lr=1e-3, muon_lr=0.004, warmup_steps=10)


class Cpt(Stage[CptConfig]):
    """Artifact: a model directory. Figures: perplexity of held-out source before and after, also by position in a row
    (each in quarters of a row); with ``stretch`` also that of the model as it came, read beyond the positions it knows
    (``perplexity_unstretched``). Input ``heads``: a model of the same shape whose MTP heads are taken over."""

    Config = CptConfig
    packages = TRAIN
    inputs = ("base",)
    optional_inputs = ("heads",)
    resumable = True

    def run(self, context: StageContext) -> Figures:
        from cadenza.pipelines.lm_loop import LMRun, save_with_tokenizer, use_bf16
        from cadenza.tokens.tokenizer import Tokenizer
        from cadenza.training.lm import mean_nll, next_token_loss, nll_by_position
        from cadenza.training.mtp import JointLoss

        config, seed = self.config, context.seed_for("cpt")
        tokenizer = Tokenizer.load(context.input("base"))
        model = self._starting_model(context)
        batches, held = source_text(config, tokenizer, seed)

        def perplexities(of: PolicyModel) -> list[float]:
            quarters = nll_by_position(of, held, max(1, config.row_length // 4), use_bf16())
            return [math.exp(nll) for nll in (mean_nll(of, held, use_bf16()), *quarters[:4])]

        loss = JointLoss(config.mtp_weight) if len(model.mtp) and config.mtp_weight else next_token_loss
        run = LMRun(
            context, model, config.optimizer, batches, config.steps, threads=config.threads, loss=loss
        )
        before = context.out / "before.json"
        if not before.is_file():
            found = {"before": perplexities(model)}
            if config.stretch > 1.0:
                found["unstretched"] = perplexities(self._starting_model(context, stretched=False))
            write_json(before, found)
        middle = max(1, round(config.steps * config.keep_middle)) if config.keep_middle else 0

        def on_step(step: int) -> None:
            if step == middle:
                save_with_tokenizer(model, tokenizer, context.out / "middle")

        seconds = run.run(
            config.evaluate_every, lambda _: {"heldout_perplexity": perplexities(model)[0]}, on_step=on_step
        )
        save_with_tokenizer(model, tokenizer, context.out)
        run.finish()
        figures: Figures = {"tokens": run.tokens, "seconds": seconds, "row_length": config.row_length}
        for when, values in {**read_json(before), "after": perplexities(model)}.items():
            figures[f"perplexity_{when}"] = values[0]
            figures |= {f"perplexity_{when}_quarter{i}": value for i, value in enumerate(values[1:], 1)}
        before.unlink()
        return figures

    def _starting_model(self, context: StageContext, stretched: bool = True) -> PolicyModel:
        from cadenza.model.hf import load_model, take_heads, with_longer_context

        model = load_model(context.input("base"))
        if "heads" in context.artifacts:
            heads = load_model(context.input("heads"))
            if not heads.config.mtp_heads:
                raise ConfigError(
                    f"the model that fills 'heads' of stage {context.name!r} has none",
                    "name a stage that trains heads, or leave it out",
                )
            model = take_heads(model, heads)
        c = model.config
        if self.config.stretch > 1.0 or self.config.row_length > c.max_positions:
            factor = self.config.stretch if stretched else 1.0
            model = with_longer_context(model, max(c.max_positions, self.config.row_length), factor)
        return model
