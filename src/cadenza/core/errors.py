"""Typed failures.

Two families, never mixed:

* ``CadenzaError`` is for people. It carries a cause and a mend; the command line prints both on one line and
  leaves with ``exit_code``. A user's mistake never shows a stack trace.
* ``RolloutFailure`` is for machines. It names why a rollout has no verdict and says what the reconciler does
  with it: retry, grade, train. A reward is finite or there is a failure (invariant 5); nothing becomes 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class CadenzaError(Exception):
    """One line for the user: what happened, and what to do about it.

    Args:
        cause: what is wrong, with the offending name or path.
        mend: the command or change that puts it right. Rooms that do not know which stage they work for write
            STAGE for its name; the runner fills it in.
    """

    exit_code = 1

    def __init__(self, cause: str, mend: str) -> None:
        super().__init__(f"{cause}; {mend}")
        self.cause = cause
        self.mend = mend

    def for_stage(self, name: str) -> CadenzaError:
        """The same error with the stage's name in its mend."""
        return self.with_mend(re.sub(r"\bSTAGE\b", name, self.mend))

    def with_mend(self, mend: str) -> CadenzaError:
        """The same error with another mend."""
        return self if mend == self.mend else type(self)(self.cause, mend)

    def __reduce__(self):  # Ray ships exceptions between processes by pickling.
        return (type(self), (self.cause, self.mend))


class ConfigError(CadenzaError):
    """A recipe, key or value that cannot be used."""

    exit_code = 2


class MissingArtifact(CadenzaError):
    """A model directory, tokenizer, task set or run that is not where it was said to be."""

    exit_code = 3


class CorruptArtifact(CadenzaError):
    """A checkpoint or file whose content does not match its digest or format version."""

    exit_code = 4


class CorruptCheckpoint(CorruptArtifact):
    """A stage's own saved state that cannot be gone on from; the stage has to begin again."""


class SandboxUnavailable(CadenzaError):
    """The chosen backend cannot run here (invariant 12: no silent downgrade)."""

    exit_code = 5


class ResourceExhausted(CadenzaError):
    """Too little memory or disk."""

    exit_code = 6


class ServiceDied(CadenzaError):
    """A service process ended and could not be replaced."""

    exit_code = 7


class DeadlineExceeded(CadenzaError):
    """A wait that ran past its deadline; ``cause`` names what was waited for (invariant 9)."""

    exit_code = 8


class ForeignSample(CadenzaError):
    """A sample that other weights made than those the trainer handed out (invariant 1)."""

    exit_code = 12


class TrainingDiverged(CadenzaError, FloatingPointError):
    """A loss or gradient that is no number any more, most often because the learning rate is too high."""

    exit_code = 11


class Interrupted(CadenzaError):
    """The user or the system stopped the work."""

    exit_code = 130


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """Why a rollout has no score.

    ``kind`` is one of ``sandbox_gone``, ``grader_crashed``, ``grader_timeout``, ``engine_lost``, ``patch_refused``.
    ``retry``: run the same slot again. ``counts``: the failure is the model's own and is scored by the
    per-kind table of the rewards config; infrastructure failures never are.
    """

    kind: str
    detail: str
    retry: bool
    counts: bool
