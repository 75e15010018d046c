"""Backend ``local``: Linux namespaces and overlayfs, forked from a clean zygote. No root, no daemon, no packages.

One backend object owns one zygote process and one working directory; several may live on one machine. When the
process that owns it dies, even by kill -9, the zygote sees the end of its socket, and every sandbox dies with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from cadenza.core.errors import DeadlineExceeded, MissingArtifact, SandboxUnavailable, ServiceDied
from cadenza.core.types import Snapshot
from cadenza.sandbox import probe as probing
from cadenza.sandbox.errors import SandboxGone
from cadenza.sandbox.handle import Sandbox
from cadenza.sandbox.layers import Entry, Hold, LayerStore
from cadenza.sandbox.spec import Capabilities, LocalConfig, SandboxSpec
from cadenza.sandbox.workdir import WorkDir

_GUEST = Path(__file__).parent / "guest"
_BOOT = """
import importlib.util, sys
where = sys.argv[1]
spec = importlib.util.spec_from_file_location(
    "_cadenza_guest", where + "/__init__.py", submodule_search_locations=[where])
sys.modules["_cadenza_guest"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
try:
    from _cadenza_guest import zygote
except ImportError as error:
    import json, socket
    text = {"unusable": f"the sandbox's interpreter cannot import what it needs ({error})"}
    sys.exit(socket.socket(fileno=int(sys.argv[2])).send(json.dumps(text).encode()))
zygote.main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


class LocalBackend:
    """Creates sandboxes on this machine.

    Use as an async context manager, or call ``start`` and ``aclose``. All methods belong to one event loop.
    """

    def __init__(self, config: LocalConfig | None = None) -> None:
        self.config = config or LocalConfig()
        self._numbers = itertools.count(1)
        self._births: dict[int, asyncio.Future[None]] = {}
        self._deaths: dict[int, asyncio.Future[None]] = {}
        self._sandboxes: dict[int, Sandbox] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._send_lock = asyncio.Lock()
        self._work: WorkDir | None = None
        self._scratch = ""
        self.layers: LayerStore | None = None
        self._snapshots: dict[str, tuple[SandboxSpec, Hold]] = {}

    @property
    def name(self) -> str:
        """Part of every sandbox's id; unique on this machine while the backend lives."""
        return f"local-{self._work.path.name}" if self._work else "local"

    @property
    def scratch_kind(self) -> str:
        """``tmpfs`` or ``disk``: where changed files live, once started."""
        return self._scratch

    @property
    def pid(self) -> int:
        """The zygote's process id; its children are the sandboxes. 0 when not started."""
        return self._process.pid if self._process else 0

    @staticmethod
    def probe() -> Capabilities:
        """Really creates a sandbox and runs a command in it. Raises nothing; see ``reason`` and ``mend``."""
        return probing.probe(LocalBackend)

    async def __aenter__(self) -> LocalBackend:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Starts the zygote.

        Raises:
            SandboxUnavailable: not Linux, or the zygote cannot serve here.
            DeadlineExceeded: it did not answer within ``start_timeout_s``.
        """
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailable(
                f"backend local needs Linux, this is {sys.platform}",
                "run it on Linux, for example in a virtual machine",
            )
        self._work = WorkDir.make(self.config.directory)
        self._scratch = probing.choose_scratch(self.config.scratch, self._work.path)
        self.layers = LayerStore(self._work.path / "layers")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host = os.pidfd_open(os.getpid())
        try:
            argv = [sys.executable, "-P", "-s", "-c", _BOOT, str(_GUEST), str(theirs.fileno()), str(host)]
            self._process = subprocess.Popen(
                [*argv, str(self._work.path)],
                env={"PYTHONHASHSEED": "0"},  # the same for every sandbox, so that a test run repeats exactly
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), host),
                start_new_session=True,  # a Ctrl-C is for the host, which then closes us
            )
        finally:
            theirs.close()
            os.close(host)
        ours.setblocking(False)
        self._control = ours
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(ours.fileno(), self._on_control)
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                await self._ready
        except TimeoutError:
            await self.aclose()
            raise DeadlineExceeded(
                "the sandbox zygote did not start in time", "raise start_timeout_s"
            ) from None
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Destroys every sandbox, ends the zygote, frees every layer and directory. Idempotent."""
        await asyncio.gather(*(s.destroy() for s in list(self._sandboxes.values())), return_exceptions=True)
        self._lost("the backend was closed")
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            await asyncio.to_thread(process.wait)
        if self._work is not None:
            work, self._work = self._work, None
            await asyncio.to_thread(work.remove)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox, ready for commands.

        Raises:
            SandboxUnavailable: the kernel refused namespaces or mounts; names the setting.
            ServiceDied: the zygote is gone.
            DeadlineExceeded: not ready within ``create_timeout_s``.
            FileNotFoundError: a layer does not exist.
        """
        for layer in spec.layers:
            if not layer.is_dir():
                raise FileNotFoundError(f"layer {layer} is not a directory")
        if self._control is None or self._work is None or self.layers is None:
            raise ServiceDied("the sandbox zygote is not running", "start the backend again")
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        self._deaths[number] = loop.create_future()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        scratch = self._work.scratch(number) if self._scratch == "disk" else None
        sandbox = Sandbox(self, number, spec, self.layers.hold(spec.layers), scratch)
        self._sandboxes[number] = sandbox
        try:
            async with asyncio.timeout(self.config.create_timeout_s):
                await self._send({"create": number}, theirs.fileno())
                theirs.close()
                await sandbox.connect(ours)
        except TimeoutError:
            await sandbox.destroy()
            raise DeadlineExceeded("a sandbox was not ready in time", "raise create_timeout_s") from None
        except BaseException:
            theirs.close()
            await sandbox.destroy()
            raise
        return sandbox

    async def save(self, spec: SandboxSpec, entries: list[Entry]) -> Snapshot:
        """Keeps ``entries`` on top of the layers of ``spec``. For ``Sandbox.snapshot``."""
        assert self.layers is not None
        layers, hold, size = self.layers.add(entries, spec.layers)
        number = next(self._numbers)
        digest = hashlib.sha256()
        for entry, content in entries:
            digest.update(json.dumps(entry, sort_keys=True).encode() + b"\0" + content)
        snapshot = Snapshot(f"{self.name}-s{number}", None, "local", "filesystem", digest.hexdigest(), size)
        self._snapshots[snapshot.id] = (dataclasses.replace(spec, layers=layers), hold)
        return snapshot

    def changes(self, entries: list[Entry], spec: SandboxSpec) -> dict[str, bytes | None]:
        """``entries`` and the snapshots below them, against the layers that are not snapshots. For ``Sandbox``."""
        assert self.layers is not None
        return self.layers.changes(entries, spec.layers)

    async def restore(self, snapshot: Snapshot, n: int = 1) -> list[Sandbox | Exception]:
        """``n`` new sandboxes with the snapshot's files, limits and environment.

        Raises:
            MissingArtifact: the snapshot was released, or belongs to another backend.
        """
        if snapshot.id not in self._snapshots:
            raise MissingArtifact(f"no snapshot {snapshot.id}", "take one, and restore it before release")
        spec, _ = self._snapshots[snapshot.id]
        made = await asyncio.gather(*(self.create(spec) for _ in range(n)), return_exceptions=True)
        for result in made:
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
        return [result for result in made if isinstance(result, Sandbox | Exception)]

    def release(self, snapshot: Snapshot) -> None:
        """Forgets a snapshot; its files go with the last sandbox that stands on them. Idempotent."""
        kept = self._snapshots.pop(snapshot.id, None)
        if kept is not None:
            kept[1].release()

    async def kill(self, number: int) -> None:
        """Ends sandbox ``number`` and waits until its last process is gone. For ``Sandbox.destroy``."""
        death = self._deaths.get(number)
        if death is not None and self._control is not None:
            with contextlib.suppress(ServiceDied):
                await self._send({"kill": number})
                try:
                    async with asyncio.timeout(self.config.destroy_timeout_s):
                        await asyncio.shield(death)
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"sandbox {number} did not end in time", "see dmesg for stuck I/O"
                    ) from None
        self._died(number)

    async def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        data = json.dumps(message).encode()
        async with self._send_lock:
            while True:
                if self._control is None:
                    raise ServiceDied("the sandbox zygote is gone", "start the backend again")
                try:
                    socket.send_fds(self._control, [data], [] if fd is None else [fd])
                    return
                except BlockingIOError:
                    await self._writable(self._control)
                except OSError as error:
                    raise ServiceDied(
                        f"the sandbox zygote is gone ({error})", "start the backend again"
                    ) from error

    async def _writable(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        free = loop.create_future()
        loop.add_writer(control.fileno(), lambda: free.done() or free.set_result(None))
        try:
            await free
        finally:
            loop.remove_writer(control.fileno())

    def _on_control(self) -> None:
        assert self._control is not None and self._ready is not None
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost("the sandbox zygote died")
            return
        message = json.loads(data)
        if "dead" in message:
            self._died(message["dead"])
        elif "refused" in message:
            sandbox = self._sandboxes.get(message["refused"])
            if sandbox is not None:
                sandbox.lose(probing.refusal(message["errno"], "clone"))
            self._died(message["refused"])
        elif "ready" in message:
            self._ready.set_result(None)
        elif "unusable" in message and not self._ready.done():
            self._ready.set_exception(
                SandboxUnavailable(message["unusable"], "see docs/explanation/sandbox.md")
            )

    def _died(self, number: int) -> None:
        sandbox = self._sandboxes.pop(number, None)
        if sandbox is not None:
            sandbox.bury()
        death = self._deaths.pop(number, None)
        if death is not None and not death.done():
            death.set_result(None)

    def _lost(self, why: str) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxUnavailable(why + " while starting", "see its messages above"))
        for sandbox in list(self._sandboxes.values()):
            sandbox.lose(SandboxGone(why))
        for number in list(self._deaths):
            self._died(number)
