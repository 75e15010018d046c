"""The training service: the policy in fp32, its Adam state, one RL step a call, checkpoints that resume exactly."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from cadenza.core.errors import CorruptCheckpoint, MissingArtifact
from cadenza.core.memory import is_out_of_memory
from cadenza.core.types import Rollout
from cadenza.model.hf import load_model, save_model
from cadenza.training.checkpoint import BEGIN_AGAIN, load_state, save_state
from cadenza.training.config import RLStepConfig
from cadenza.training.rl import make_batch, rl_step

CHECKPOINT = "trainer.pt"


def weights_digest(state: dict[str, Tensor]) -> str:
    """First 16 hex digits of a BLAKE2 over names and raw bytes; what the engine echoes on every sample."""
    h = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(state.items()):
        h.update(name.encode())
        h.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


class TrainerService:
    """Owns the trained weights. Version 0 is what it starts from; each step makes the next.

    Args:
        model_directory: the policy to start from; also the reference when ``kl_beta`` is set.
        threads: cores for its products.
        bf16: autocast the products to bfloat16 (fp32 master weights either way).
    """

    def __init__(self, model_directory: str, config: RLStepConfig, threads: int, bf16: bool) -> None:
        self.threads = threads
        self.config, self.bf16 = config, bf16
        self.model = load_model(Path(model_directory))
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.kl_beta else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.version = 0

    def set_threads(self, threads: int) -> None:
        """Cores for the steps from now on."""
        self.threads = threads

    def step(self, groups: list[list[Rollout]], progress: float = 0.0) -> dict[str, float]:
        """Trains on whole groups when ``progress`` (0..1) of the run is over; afterwards ``version`` is one higher.
        Raises ValueError on a sample from a version this trainer has not made (invariant 1)."""
        for group in groups:
            for rollout in group:
                for s in rollout.segments:
                    if len(s.version_S) and int(s.version_S.max()) > self.version:
                        raise ValueError(
                            f"a sample claims policy version {int(s.version_S.max())}, not made yet"
                        )
        torch.set_num_threads(
            self.threads
        )  # here: OpenMP keeps the number per thread, and calls change threads
        batch = make_batch(
            groups,
            self.config.mask_overlong,
            self.config.samples_per_group,
            keep_zero=self.reference is not None,
        )
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

    def weights(self, dtype: str) -> tuple[dict[str, Tensor], str]:
        """(state in the serving dtype, digest)."""
        target = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
        state = {k: v.detach().to(target, copy=True) for k, v in self.model.state_dict().items()}
        return state, weights_digest(state)

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
        self.version = version
        return version

    def export(self, directory: str, bos_token_id: int, eos_token_id: int) -> None:
        """Writes the policy as a Hugging Face directory (fp32 weights)."""
        save_model(self.model, Path(directory), bos_token_id=bos_token_id, eos_token_id=eos_token_id)

    def stop(self) -> None:
        """Nothing runs between calls."""
