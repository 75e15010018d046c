"""Fast screening of generated code: correct and buggy versions really run, in a forked child, call by call.

This runs only code that this package generated, never a model's. It answers which calls tell a mutant from the correct
version; the tasks that survive are validated again in a real sandbox (``validate.py``).
"""

from __future__ import annotations

import ast
import gc
import os
import pickle
import resource
import select
import signal
import struct
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass

from cadenza.core.errors import DeadlineExceeded
from cadenza.tasks.draft import Call, lit

CALL_CPU_S = (
    0.02  # of user CPU time, so that a busy machine changes no verdict; a clean call takes microseconds
)
BATCH_DEADLINE_S = 60.0
_MEMORY_ROOM = 512 << 20
ENDLESS = "does not end"  # of a buggy version that ran into the limit
_MAX_TEXT = 60  # of an expected value: longer ones cost tokens and teach nothing

Sources = tuple[tuple[str, str], ...]  # (module name, source), imported modules first


@dataclass(frozen=True, slots=True)
class Probe:
    """One correct repository, its buggy versions, and calls as (module, call)."""

    good: Sources
    buggy: tuple[Sources, ...]
    calls: tuple[tuple[str, Call], ...]


@dataclass(frozen=True, slots=True)
class Observation:
    """What one call did. ``value``: what the correct code returned. ``actual``: per buggy version None where the
    call passes, else what happens instead in words (``gives 3``, ``raises TypeError``, ``ENDLESS``)."""

    value: object
    actual: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Screened:
    """Per call an observation, or None where the correct code itself has no plain value there."""

    calls: tuple[Observation | None, ...]


class _TooLong(BaseException):
    pass


def screen(probes: Sequence[Probe]) -> list[Screened | None]:
    """Runs the probes in forked children; None for a probe that killed its child.

    Raises:
        DeadlineExceeded: a child made no progress for ``BATCH_DEADLINE_S``.
    """
    results: list[Screened | None] = []
    while len(results) < len(probes):
        results.extend(_child(probes[len(results) :]))
        if len(results) < len(probes):
            results.append(None)  # the one that was running when the child ended
    return results


def _child(probes: Sequence[Probe]) -> list[Screened]:
    """Forks, runs probes until done or dead, returns those finished."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            _serve(probes, write)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    try:
        return _collect(read, len(probes))
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _collect(read: int, count: int) -> list[Screened]:
    data, done = bytearray(), []
    deadline = time.monotonic() + BATCH_DEADLINE_S
    while len(done) < count:
        if not select.select([read], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise DeadlineExceeded(
                "screening of generated code", "report this: a probe outlived its CPU limit"
            )
        chunk = os.read(read, 1 << 16)
        if not chunk:
            break
        data += chunk
        while len(data) >= 4 and len(data) >= 4 + (size := struct.unpack_from("<I", data)[0]):
            done.append(pickle.loads(data[4 : 4 + size]))
            del data[: 4 + size]
            deadline = time.monotonic() + BATCH_DEADLINE_S
    return done


def _serve(probes: Sequence[Probe], write: int) -> None:
    gc.disable()
    limit = _address_space() + _MEMORY_ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGVTALRM, _alarm)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for probe in probes:
        payload = pickle.dumps(_run(probe))
        message = struct.pack("<I", len(payload)) + payload
        while message:
            message = message[os.write(write, message) :]


def _address_space() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def _alarm(*_: object) -> None:
    raise _TooLong


def _run(probe: Probe) -> Screened:
    good = _load(probe.good)
    compiled = [(module, _compiled(call)) for module, call in probe.calls]
    values = [_observe(good, module, code) for module, code in compiled]
    plain = [v[1] if v[0] == "value" and _is_plain(v[1]) else _NOTHING for v in values]
    versions = []
    for sources in probe.buggy:
        touched = _touched(probe.good, sources)
        namespaces = _load(sources)
        actual: list[str | None] = []
        for v, (module, code) in zip(plain, compiled, strict=True):
            if v is _NOTHING or module not in touched:
                actual.append(None)
            elif ENDLESS in actual:  # decided; every further call would cost the limit again
                actual.append(ENDLESS)
            else:
                actual.append(_difference(_observe(namespaces, module, code), v))
        versions.append(actual)
    return Screened(
        tuple(
            None if v is _NOTHING else Observation(v, tuple(version[i] for version in versions))
            for i, v in enumerate(plain)
        )
    )


def _touched(good: Sources, buggy: Sources) -> set[str]:
    """Modules that differ, and those that import one that differs."""
    out: set[str] = set()
    for (name, before), (_, after) in zip(good, buggy, strict=True):  # imported modules come first
        if before != after or any(f"from {other} import" in after for other in out):
            out.add(name)
    return out


def _compiled(call: Call) -> tuple[types.CodeType | None, types.CodeType]:
    setup = compile("\n".join(call.setup), "setup", "exec") if call.setup else None
    return setup, compile(call.expression, "call", "eval")


_NOTHING = object()


def _load(sources: Sources) -> dict[str, dict] | str:
    """Executes the modules; their namespaces, or the name of the error."""
    loaded: list[str] = []
    out: dict[str, dict] = {}
    hidden = {name: sys.modules.get(name) for name, _ in sources}
    signal.setitimer(signal.ITIMER_VIRTUAL, CALL_CPU_S)
    try:
        for name, source in sources:
            module = types.ModuleType(name)
            sys.modules[name] = module
            loaded.append(name)
            exec(compile(source, f"{name}.py", "exec"), module.__dict__)
            out[name] = module.__dict__
    except _TooLong:
        return ENDLESS
    except Exception as e:
        return f"raises {type(e).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        for name in loaded:
            if (old := hidden[name]) is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return out


def _observe(
    namespaces: dict[str, dict] | str, module: str, code: tuple[types.CodeType | None, types.CodeType]
) -> tuple[str, object]:
    """("value", v) or ("words", what happened instead)."""
    if isinstance(namespaces, str):
        return "words", namespaces
    scope = dict(namespaces[module])
    signal.setitimer(signal.ITIMER_VIRTUAL, CALL_CPU_S)
    try:
        if code[0]:
            exec(code[0], scope)
        return "value", eval(code[1], scope)
    except _TooLong:
        return "words", ENDLESS
    except (Exception, RecursionError, MemoryError) as e:
        return "words", f"raises {type(e).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _difference(observed: tuple[str, object], expected: object) -> str | None:
    kind, value = observed
    if kind == "words":
        return str(value)
    try:
        if value == expected:
            return None
        text = lit(value)
    except Exception as e:
        return f"raises {type(e).__name__}"
    return f"gives {text}" if len(text) <= _MAX_TEXT else "gives something else"


def _is_plain(value: object) -> bool:
    """Whether the value can stand in a test as a short literal and means itself there."""
    text = lit(value)
    if len(text) > _MAX_TEXT:
        return False
    try:
        return ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        return False
