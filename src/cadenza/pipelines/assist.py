"""A trained model at work on a folder: engine, sandbox and agent put together for ``cadenza agent``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cadenza.core.artifacts import verify_if_artifact
from cadenza.core.errors import CadenzaError, ServiceDied
from cadenza.harness import Agent, demo_tools
from cadenza.harness.work_on import Work, work_on
from cadenza.inference.client import EngineClient
from cadenza.inference.requests import Completion, Request
from cadenza.pipelines.services import limits_and_engine
from cadenza.sandbox import LocalBackend, SandboxGone
from cadenza.tasks.patch import PatchRefused, make_patch
from cadenza.tokens import CompactRenderer, Sampling, SessionLost, Tokenizer, TokenSession


def assist(
    directory: Path,
    task: str,
    model: Path,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Work:
    """Lets the model work on a copy of ``directory``, which is not touched; ``Work.apply`` writes the changes. The
    agent has the limits that the model was trained under.

    Args:
        task: what to do, as one would tell a colleague.
        on_step: called with each entry of the trace as it happens.

    Raises:
        MissingArtifact, CorruptArtifact: no usable model or tokenizer there.
        SandboxUnavailable: this machine allows no sandboxes. ServiceDied: the sandbox or the engine ended.
        CadenzaError: the folder cannot be read, or the changes cannot be told as a patch.
    """
    from cadenza.inference.service import EngineService  # torch

    verify_if_artifact(model)
    renderer = CompactRenderer(Tokenizer.load(model))
    limits, engine_config = limits_and_engine(model)
    service = EngineService(str(model), engine_config)

    async def exchange(
        client: str, requests: list[Request], closed: list[str], wait_s: float
    ) -> list[Completion]:
        return await asyncio.to_thread(service.exchange, client, requests, closed, wait_s)

    async def run() -> Work:
        engine = EngineClient(exchange, renderer)

        async def open_session() -> TokenSession:
            return engine.session(seed)

        try:
            async with LocalBackend() as backend:
                return await work_on(
                    directory,
                    task,
                    open_session,
                    backend,
                    agent=Agent(renderer, demo_tools(), limits),
                    make_patch=make_patch,
                    sampling=Sampling(temperature=temperature),
                    on_step=on_step,
                )
        finally:
            await engine.aclose()

    try:
        return asyncio.run(run())
    except SandboxGone as error:
        raise ServiceDied(
            f"the agent's sandbox ended ({error})", "DIR is unchanged; run the same command again"
        ) from error
    except SessionLost as error:
        raise ServiceDied(
            f"the model stopped answering ({error})", "DIR is unchanged; run the same command again"
        ) from error
    except PatchRefused as error:
        raise CadenzaError(
            f"what the agent changed cannot be told as a patch ({error})",
            "DIR is unchanged; ask for changes of text files only",
        ) from error
    finally:
        service.stop()


def readable_step(entry: dict[str, Any]) -> str | None:
    """One line for a person watching: the call, or what the model said. None for entries that say nothing."""
    for kind in ("call", "final", "broken"):
        if kind in entry:
            first, *rest = str(entry[kind]).splitlines() or [""]
            failed = f" -> {entry.get('output') or entry['error_kind']}" if entry.get("error_kind") else ""
            return (
                f"{kind}: {first}" + (f" (+{len(rest)} lines)" if rest else "") + " ".join(failed.split("\n"))
            )
    return None
