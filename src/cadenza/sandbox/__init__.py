"""Where untrusted code runs. Start with ``LocalBackend`` and ``SandboxSpec``."""

from cadenza.sandbox.errors import NotSupported, PathRefused, SandboxGone
from cadenza.sandbox.handle import Sandbox
from cadenza.sandbox.local import LocalBackend
from cadenza.sandbox.spec import (
    Capabilities,
    ExecResult,
    Failure,
    Limits,
    LocalConfig,
    PytestResult,
    SandboxSpec,
)

__all__ = [
    "Capabilities",
    "ExecResult",
    "Failure",
    "Limits",
    "LocalBackend",
    "LocalConfig",
    "NotSupported",
    "PathRefused",
    "PytestResult",
    "Sandbox",
    "SandboxGone",
    "SandboxSpec",
]
