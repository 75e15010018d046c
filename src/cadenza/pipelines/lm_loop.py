"""The stage side of next-token training: resume, evaluation points, curves, the saved model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cadenza.core.errors import CorruptCheckpoint
from cadenza.core.memory import is_out_of_memory
from cadenza.evaluation.report_inputs import MetricWriter
from cadenza.model.hf import save_model
from cadenza.model.transformer import PolicyModel
from cadenza.pipelines.stages import StageContext
from cadenza.tokens.tokenizer import Tokenizer
from cadenza.training.checkpoint import BEGIN_AGAIN, load_state, save_state
from cadenza.training.config import OptimizerConfig
from cadenza.training.lm import LoopState, Loss, Rows, next_token_loss, train
from cadenza.training.optimizers import Optimizers

STATE = "state.pt"


def use_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; elsewhere it is several times slower than fp32."""
    return torch.cpu._is_avx512_bf16_supported()


def save_with_tokenizer(
    model: PolicyModel, tokenizer: Tokenizer, directory: Path, dtype: torch.dtype | None = None
) -> None:
    """A Hugging Face directory that `cadenza eval` and `cadenza agent` can be pointed at."""
    bos, end = tokenizer.id("<|bos|>"), tokenizer.id("<|end|>")
    tokenizer.save(directory)
    save_model(model, directory, bos_token_id=bos, eos_token_id=end, dtype=dtype)


class LMRun:
    """Trains ``model`` for a stage. Interrupted and started again it continues at the last saved step."""

    def __init__(
        self,
        context: StageContext,
        model: PolicyModel,
        optimizer: OptimizerConfig,
        batches: Callable[[int], list[Rows]],
        steps: int,
        *,
        threads: int,
        loss: Callable[[PolicyModel, Rows, bool], Loss] = next_token_loss,
        shown: str = "loss",
        save_every_s: float = 20.0,
    ) -> None:
        """``loss``: of a microbatch. ``shown``: what its curve is called."""
        torch.set_num_threads(threads)
        self.context, self.model, self.config = context, model, optimizer
        self.batches, self.steps, self.save_every_s = batches, steps, save_every_s
        self.loss, self.shown = loss, shown
        self.optimizers = Optimizers(model, optimizer.adam_lr, optimizer.muon_lr, optimizer.weight_decay)
        self.state = LoopState()
        self.bf16 = use_bf16()
        self.elapsed_before = 0.0
        self.tokens = 0.0
        if context.resumed and (context.out / STATE).is_file():
            self._restore()

    def run(
        self,
        evaluate_every: int,
        evaluate: Callable[[int], dict[str, float]],
        should_stop: Callable[[], bool] = lambda: False,
        max_seconds: float = float("inf"),
        on_step: Callable[[int], None] = lambda _: None,
    ) -> float:
        """Runs to the end; ``evaluate(step)`` is logged every so many steps and at the end. Returns seconds used
        in all. ``should_stop`` is asked after each evaluation; ``on_step`` is called after each step."""
        started = saved = time.monotonic()
        name = self.context.name
        left = max_seconds - self.elapsed_before
        with (
            MetricWriter(self.context.out, name) as metrics,
            self.context.progress.bar(name, self.steps) as bar,
        ):
            bar.set(self.state.step)

            def show(step: int, values: dict[str, float]) -> None:
                self.tokens += values["tokens"]
                if step % 5 == 0 or step == self.steps:
                    loss = values["nll"]
                    curves = {f"train_{self.shown}": loss}
                    if self.shown == "loss":
                        curves["train_perplexity"] = math.exp(min(loss, 20.0))
                    rest = {k: v for k, v in values.items() if k != "nll"}
                    metrics.write(self.elapsed_before + time.monotonic() - started, step, **curves, **rest)
                bar.set(step, **{self.shown: round(values["nll"], 3)})

            for step in train(
                self.model, self.optimizers, self.config, self.batches, self.steps, self.state,
                bf16=self.bf16, on_step=show, loss=self.loss, deadline_s=max_seconds, used_s=self.elapsed_before,
            ):  # fmt: skip
                on_step(step)
                now = time.monotonic()
                last = step == self.steps or now - started >= left
                if step % evaluate_every == 0 or last:
                    metrics.write(self.elapsed_before + now - started, step, **evaluate(step))
                    if should_stop():
                        break
                if now - saved > self.save_every_s:
                    self._save(now - started)
                    saved = now
        used = self.elapsed_before + time.monotonic() - started
        if self.state.step < self.steps and used >= max_seconds:
            told = f"its {max_seconds:g} s were over after {self.state.step} of {self.steps} steps"
            self.context.progress.line(f"{name}: {told}")
        return used

    def finish(self) -> None:
        """Removes what only a resume would need; call it once the model is saved."""
        (self.context.out / STATE).unlink(missing_ok=True)

    def _save(self, elapsed: float) -> None:
        state = {
            "step": self.state.step,
            "elapsed": self.elapsed_before + elapsed,
            "tokens": self.tokens,
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
        }
        save_state(state, self.context.out / STATE)

    def _restore(self) -> None:
        path = self.context.out / STATE
        try:
            state = load_state(path)
            self.model.load_state_dict(state["model"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.state.step, self.elapsed_before = state["step"], state["elapsed"]
            self.tokens = state.get("tokens", 0.0)  # checkpoints did not always count them
        except (RuntimeError, LookupError, TypeError, ValueError) as error:  # of another model
            if is_out_of_memory(error):
                raise
            raise CorruptCheckpoint(
                f"the checkpoint {path} is not one of this model ({type(error).__name__})", BEGIN_AGAIN
            ) from error
