"""Stage ``sft``: supervised fine-tuning on the demonstrations, to a plateau; the best checkpoint is kept."""

from __future__ import annotations

from pydantic import Field

from cadenza.core.config import StrictConfig
from cadenza.core.extras import TRAIN
from cadenza.evaluation.report_inputs import read_metrics
from cadenza.harness import limits_of, save_limits
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.rollouts.record import read_rollouts
from cadenza.training.config import OptimizerConfig, SftDataConfig


class SftConfig(StrictConfig):
    """What comes first ends the training: its epochs, its seconds, or a validation loss that has become flat.

    ``epochs``: passes over the demonstrations. ``budget_s``: seconds at most. ``patience``: evaluations without a
    better validation loss of the expert's tokens after which it is flat (0: never stop early); ``tolerance``: share of
    the best loss by which a better one is lower. ``evaluations_per_epoch``: looks at the validation loss.
    ``keep_best``: keeps the weights of the best evaluation and not the last. ``tokens_per_step``: of one optimizer
    step; ``tokens_per_microbatch``: of one pass through the model. ``threads``: cores. ``mtp_weight``: of the loss of
    the MTP heads, which are trained along when the model has some. ``data``: which tokens count how much.
    ``optimizer``: its rates.
    """

    epochs: float = Field(default=8.0, gt=0)
    budget_s: float = Field(default=1e9, gt=0)
    tokens_per_step: int = Field(default=4096, gt=0)
    tokens_per_microbatch: int = Field(default=4096, gt=0)
    threads: int = Field(default=2, gt=0)
    evaluations_per_epoch: int = Field(default=2, gt=0)
    patience: int = Field(default=4, ge=0)
    tolerance: float = Field(default=0.01, ge=0)
    keep_best: bool = True
    mtp_weight: float = Field(default=0.1, ge=0)
    data: SftDataConfig = SftDataConfig()
    optimizer: OptimizerConfig = OptimizerConfig(
        adam_lr=1.5e-3, muon_lr=0.006, warmup_steps=10, decay_share=0.6, final_lr_scale=0.1
    )


class Sft(Stage[SftConfig]):
    """Artifact: a model directory. Input ``model`` is the policy it starts from."""

    Config = SftConfig
    version = 2
    packages = TRAIN
    inputs = ("model", "demonstrations")
    resumable = True

    def run(self, context: StageContext) -> Figures:
        from cadenza.model.hf import load_model
        from cadenza.pipelines.lm_loop import LMRun, save_with_tokenizer, use_bf16
        from cadenza.tokens.tokenizer import Tokenizer
        from cadenza.training.checkpoint import load_state, save_state
        from cadenza.training.lm import mean_nll, microbatches, next_token_loss
        from cadenza.training.mtp import JointLoss
        from cadenza.training.sft import (
            Plateau,
            epoch_batches,
            only_actions,
            split_demonstrations,
        )  # fmt: skip

        config, seed = self.config, context.seed_for("sft")
        tokenizer = Tokenizer.load(context.input("model"))
        model = load_model(context.input("model"))
        rollouts = read_rollouts(context.input("demonstrations") / "demonstrations.cdzr")
        sequences, validation = split_demonstrations(rollouts, config.data, seed, tokenizer.id("<|end|>"))
        held = microbatches(only_actions(validation), config.tokens_per_microbatch)
        per_epoch = len(epoch_batches(sequences, config.tokens_per_step, seed, 0))
        steps = max(1, round(config.epochs * per_epoch))
        orders: dict[int, list[list[int]]] = {}

        def batches(step: int):
            epoch, index = divmod(step, per_epoch)
            if epoch not in orders:
                orders.clear()
                orders[epoch] = epoch_batches(sequences, config.tokens_per_step, seed, epoch)
            chosen = orders[epoch][index % len(orders[epoch])]
            return microbatches([sequences[i] for i in chosen], config.tokens_per_microbatch)

        optimizer = config.optimizer
        loss = JointLoss(config.mtp_weight) if len(model.mtp) and config.mtp_weight else next_token_loss
        run = LMRun(context, model, optimizer, batches, steps, threads=config.threads, loss=loss)
        # What an interrupted run saw: its evaluations, up to the step it goes on from, and its best weights.
        curve = read_metrics(context.out / "metrics" / f"{context.name}.jsonl")
        seen = [y for x, y in zip(*curve.series("heldout_loss"), strict=True) if x <= run.state.step]
        plateau = Plateau.replay(config.patience, config.tolerance, seen if context.resumed else [])
        best = context.out / "best.pt"

        def evaluate(_step: int) -> dict[str, float]:
            loss = mean_nll(model, held, use_bf16())
            if plateau.observe(loss) and config.keep_best:
                save_state(model.state_dict(), best)
            return {"heldout_loss": loss}

        every = max(1, per_epoch // config.evaluations_per_epoch)
        seconds = run.run(every, evaluate, lambda: bool(config.patience) and plateau.flat, config.budget_s)
        if best.is_file():
            model.load_state_dict(load_state(best))
        save_with_tokenizer(model, tokenizer, context.out)
        if limits := limits_of(context.input("demonstrations")):
            save_limits(limits, context.out)
        run.finish()
        best.unlink(missing_ok=True)
        return {
            "demonstrations": len(rollouts),
            "steps": run.state.step,
            "epochs": run.state.step / per_epoch,
            "validation_nll": mean_nll(model, held, use_bf16()),
            "plateau": plateau.flat,
            "seconds": seconds,
        }
