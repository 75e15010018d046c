"""Stages that give the base model: ``PretrainBase`` trains one, ``ShippedBase`` takes the one in the package."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from cadenza.core.config import StrictConfig, digest_of
from cadenza.core.errors import ConfigError, MissingArtifact
from cadenza.core.extras import TRAIN
from cadenza.model.config import ModelConfig
from cadenza.pipelines.stages import Figures, Stage, StageContext
from cadenza.training.config import MixtureConfig, OptimizerConfig

if TYPE_CHECKING:  # a dry run reads only the configuration and need not wait for torch
    from cadenza.model.transformer import PolicyModel
    from cadenza.tokens.tokenizer import Tokenizer


class ShippedBaseConfig(StrictConfig):
    """``directory``: a model directory to start from; empty takes the package's own."""

    directory: str = ""


class ShippedBase(Stage[ShippedBaseConfig]):
    """Artifact: a copy of the base model directory, so that the run holds all it needs."""

    Config = ShippedBaseConfig

    @classmethod
    def reads(cls, config: ShippedBaseConfig) -> str:
        found = {}
        try:
            for path in _source(config).iterdir():
                if path.is_file():
                    with path.open("rb") as file:
                        found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:  # what is missing is named when the stage needs it
            return ""
        return digest_of(found)

    def run(self, context: StageContext) -> Figures:
        source = _source(self.config)
        if not (source / "model.safetensors").is_file():
            raise MissingArtifact(
                f"no base model in {source}",
                "run `cadenza train demo-base` and set base.directory to its folder `base`",
            )
        for file in source.iterdir():
            if file.is_file():
                shutil.copy2(file, context.out / file.name)
        return {"shipped": not self.config.directory}


def _source(config: ShippedBaseConfig) -> Path:
    return Path(config.directory) if config.directory else shipped_base()


def shipped_base() -> Path:
    """Where the package keeps the pretrained demo base."""
    return Path(str(resources.files("cadenza") / "assets" / "demo-base"))


class PretrainBaseConfig(StrictConfig):
    """Pretraining of the demo base, from nothing or from ``inputs = { model = .. }``, whose shape and tokenizer it then
    keeps.

    ``model``: its shape. ``vocab_size``: tokens of the tokenizer. ``steps``: of the optimizer. ``source_tokens``:
    Python source read at most; ``source_documents``: files it comes from, at most. ``tokenizer_source_documents``:
    files of source that the tokenizer is trained on; ``tokenizer_generated_documents``: generated texts beside them.
    ``tokens_per_microbatch``: of one pass through the model. ``threads``: cores. ``evaluate_every``: steps from one
    look at held-out text to the next. ``mixture``: what a step reads. ``optimizer``: its rates.
    """

    model: ModelConfig = ModelConfig()
    vocab_size: int = Field(default=1024, gt=0)
    steps: int = Field(default=3000, gt=0)
    source_tokens: int = Field(default=3_000_000, gt=0)
    source_documents: int = Field(default=1200, gt=0)
    tokenizer_source_documents: int = Field(default=400, ge=0)
    tokenizer_generated_documents: int = Field(default=6000, ge=0)
    tokens_per_microbatch: int = Field(default=4096, gt=0)
    threads: int = Field(default=2, gt=0)
    evaluate_every: int = Field(default=200, gt=0)
    mixture: MixtureConfig = MixtureConfig()
    optimizer: OptimizerConfig = OptimizerConfig()


_TOKENIZER_KEYS = ("tokenizer_source_documents", "tokenizer_generated_documents")


def _default(key: str) -> object:
    return PretrainBaseConfig.model_fields[key].default


class PretrainBase(Stage[PretrainBaseConfig]):
    """Artifact: a Hugging Face directory in bf16 with its tokenizer. Optional input ``model``: what it goes on from."""

    Config = PretrainBaseConfig
    packages = TRAIN
    optional_inputs = ("model",)
    resumable = True

    def run(self, context: StageContext) -> Figures:
        import torch

        from cadenza.pipelines.lm_loop import LMRun, save_with_tokenizer, use_bf16
        from cadenza.training.corpus import python_documents, source_directories, token_stream
        from cadenza.training.lm import mean_nll, microbatches
        from cadenza.training.pretraining import mixture

        config = self.config
        # A second stage of the same recipe must not read the first one's text again.
        seed = context.seed_for(f"base/{context.name}" if "model" in context.artifacts else "base")
        found = python_documents(source_directories(), held_out=False)
        documents = list(itertools.islice(found, config.source_documents))
        model, tokenizer = self._start(context, documents, seed)
        source = token_stream(documents, tokenizer, config.source_tokens)
        mix = config.mixture
        # Seeds of the evaluation batch lie beyond any training step's.
        held_mix = mix.model_copy(update={"tokens_per_step": 16_000, "source_share": 0.0})
        held = microbatches(mixture(10**7, seed, source, tokenizer, held_mix), config.tokens_per_microbatch)

        def batches(step: int):
            rows = mixture(step, seed, source, tokenizer, mix)
            return microbatches(rows, config.tokens_per_microbatch)

        optimizer = config.optimizer
        run = LMRun(context, model, optimizer, batches, config.steps, threads=config.threads)
        seconds = run.run(
            config.evaluate_every, lambda _: {"heldout_loss": mean_nll(model, held, use_bf16())}
        )
        save_with_tokenizer(model, tokenizer, context.out, torch.bfloat16)
        run.finish()
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "held_out_nll": mean_nll(model, held, use_bf16()),
            "seconds": seconds,
        }

    def _start(self, context: StageContext, documents: list[str], seed: int) -> tuple[PolicyModel, Tokenizer]:
        """The model given, or a new one with a tokenizer of its own."""
        from cadenza.model.hf import load_model
        from cadenza.model.transformer import PolicyModel
        from cadenza.tokens.tokenizer import Tokenizer
        from cadenza.training.pretraining import tokenizer_texts

        config = self.config
        if "model" in context.artifacts:
            shaping = [
                k for k in ("model", "vocab_size", *_TOKENIZER_KEYS) if getattr(config, k) != _default(k)
            ]
            if shaping:
                raise ConfigError(
                    f"stage {context.name!r} goes on from a model and cannot change its shape or tokenizer",
                    f"take away the keys {', '.join(f'{context.name}.{k}' for k in shaping)}, or its input",
                )
            return load_model(context.input("model")), Tokenizer.load(context.input("model"))
        texts = tokenizer_texts(
            documents[: config.tokenizer_source_documents], seed, config.tokenizer_generated_documents
        )
        tokenizer = Tokenizer.train(texts, config.vocab_size)
        model = PolicyModel(config.model.model_copy(update={"vocab_size": tokenizer.vocab_size}))
        model.initialize(seed)
        return model, tokenizer
