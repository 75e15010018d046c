"""The training service: the policy in fp32, its Adam state, one RL step a call, checkpoints that resume exactly."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from cadenza.core.errors import CorruptCheckpoint, ForeignSample, MissingArtifact
from cadenza.core.memory import is_out_of_memory
from cadenza.core.types import Rollout, Segment, parse_weights
from cadenza.model.digest import weights_digest
from cadenza.model.hf import load_model, save_model
from cadenza.training.checkpoint import BEGIN_AGAIN, load_state, save_state
from cadenza.training.config import RLStepConfig
from cadenza.training.rl import Batch, make_batch, rl_step, single_batch
from cadenza.weights import ChainAddress, Link, Publisher
from cadenza.weights.tensors import state_of

CHECKPOINT = "trainer.pt"


class TrainerService:
    """Owns the trained weights. Version 0 is what it starts from; each step makes the next.

    Args:
        model_directory: the policy to start from; also the reference when ``kl_beta`` is set.
        threads: cores for its products.
        bf16: autocast the products to bfloat16 (fp32 master weights either way).
        chain: where its versions are published.
    """

    def __init__(
        self, model_directory: str, config: RLStepConfig, threads: int, bf16: bool, chain: ChainAddress
    ) -> None:
        self.threads = threads
        self.config, self.bf16 = config, bf16
        self.model = load_model(Path(model_directory))
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.kl_beta else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.version = 0
        self.handed_out: dict[int, str] = {}  # version -> digest of the weights an engine may sample from
        self.chain = chain
        self.publisher = Publisher.at(chain)
        self.published: Future[Link] | None = None  # the newest one

    def set_threads(self, threads: int) -> None:
        """Cores for the steps from now on."""
        self.threads = threads

    def step(self, groups: list[list[Rollout]], progress: float = 0.0) -> dict[str, float]:
        """Trains on whole groups when ``progress`` (0..1) of the run is over; afterwards ``version`` is one higher.
        Raises ForeignSample on one from other weights than those ``weights`` has handed out (invariant 1)."""
        self._check_origins(rollout for group in groups for rollout in group)
        batch = make_batch(
            groups,
            self.config.mask_overlong,
            self.config.samples_per_group,
            keep_zero=self.reference is not None,
        )
        return self._step(batch, progress)

    def step_single(
        self, rollouts: list[Rollout], advantages: list[float], progress: float = 0.0
    ) -> dict[str, float]:
        """As ``step``, on rollouts without groups that bring their advantages."""
        self._check_origins(rollouts)
        return self._step(single_batch(rollouts, advantages), progress)

    def _step(self, batch: Batch, progress: float) -> dict[str, float]:
        # Here: OpenMP keeps the number per thread, and calls change threads.
        torch.set_num_threads(self.threads)
        metrics = rl_step(
            self.model,
            self.optimizer,
            batch,
            self.config,
            self.version,
            bf16=self.bf16,
            reference=self.reference,
            progress=progress,
        )
        self.version += 1
        return metrics

    def publish(self, dtype: str) -> str:
        """Hands the present weights to the chain in the serving dtype and returns their digest. Samples of this version
        are from now on those of this digest. Compression and upload go on behind the next step.

        Raises what the publication before this one raised, a full disk for example.
        """
        if self.published is not None and self.published.done():
            self.published.result()
        target = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
        state = {k: v.detach().to(target, copy=True) for k, v in self.model.state_dict().items()}
        digest = weights_digest(state)
        if self.handed_out.get(self.version) == digest:
            return digest
        self.handed_out[self.version] = digest
        self.published = self.publisher.publish(self.version, state_of(state), digest)
        return digest

    def save(self, directory: str) -> None:
        """Weights, optimizer and version, renamed into place: a kill leaves the last whole checkpoint. Raises
        ResourceExhausted when the disk is full."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        state = {
            "version": self.version,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        save_state(state, path / CHECKPOINT)

    def restore(self, directory: str) -> int:
        """Reads what ``save`` wrote and returns its version. Raises MissingArtifact or CorruptCheckpoint."""
        path = Path(directory) / CHECKPOINT
        if not path.is_file():
            raise MissingArtifact(f"no checkpoint at {path}", BEGIN_AGAIN)
        try:
            state = load_state(path)
            version = int(state["version"])
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            raise CorruptCheckpoint(
                f"the checkpoint {path} is not one of this model ({type(error).__name__})", BEGIN_AGAIN
            ) from error
        self.version, self.handed_out = version, {}
        self.publisher.close()
        self.publisher, self.published = (
            Publisher.at(self.chain),
            None,
        )  # what was published after it is forgotten
        return version

    def export(self, directory: str, bos_token_id: int, eos_token_id: int) -> None:
        """Writes the policy as a Hugging Face directory (fp32 weights)."""
        save_model(self.model, Path(directory), bos_token_id=bos_token_id, eos_token_id=eos_token_id)

    def _check_origins(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            for segment in rollout.segments:
                self._check_origin(rollout, segment)

    def _check_origin(self, rollout: Rollout, segment: Segment) -> None:
        echoed = parse_weights(segment.digests.get("weights", ""))
        for version in np.unique(segment.version_S).tolist():
            ours, theirs = self.handed_out.get(version), echoed.get(version)
            if ours is None or ours != theirs:
                raise ForeignSample(
                    f"rollout {rollout.id} was sampled from policy version {version} with weights "
                    f"{theirs or 'unknown'}, and the trainer handed out {ours or 'no such version'}",
                    "look for a second run on the same engine, then run the same command again to go on",
                )

    def stop(self) -> None:
        self.publisher.close()
