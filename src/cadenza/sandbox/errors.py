"""What can go wrong with one sandbox."""

from __future__ import annotations


class SandboxGone(Exception):
    """The sandbox ended before or during the operation: destroyed, out of time, killed, or its backend died.

    Never shown to a model as a command's output; the trial stops and the slot is run again.
    """


class PathRefused(Exception):
    """A path that leads out of ``/work``, a dangling link, or something that is not a regular file."""


class NotSupported(Exception):
    """The backend does not have this capability; it does not pretend to."""
