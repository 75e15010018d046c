"""The embedded engine: continuous batching over a slotted key-value cache, weights swapped between two steps.

One ``step`` reads top to bottom: swap weights if new ones wait; feed the tokens of new requests (prefill); sample
one token for every running request (decode). A session keeps its slot, and so its cached keys and values, between
the turns of one rollout; members of a group that start with the same tokens copy the first member's cache.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cadenza.inference.cache import KVCache, Tails
from cadenza.inference.requests import Completion, EngineConfig, Request
from cadenza.inference.sampling import sample, uniforms
from cadenza.model.transformer import PolicyModel

PREFILL_CALL_TOKENS = 1024  # most padded tokens of one call


def _width_of(count: int) -> int:
    """The padded width of ``count`` new tokens: multiples of 16 up to 64, then of 64. Rows of one width share a call,
    so that a short test result is not padded to the length of a file."""
    step = 16 if count <= 64 else 64
    return -(-count // step) * step


def torch_dtype(name: str) -> torch.dtype:
    """``auto``: bfloat16 where the CPU multiplies it in hardware, else float32."""
    if name == "auto":
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


@dataclass
class _Session:
    slot: int
    length: int = 0  # tokens whose keys and values are cached
    waiting: list[int] = field(default_factory=list)  # canonical tokens not fed yet
    request: Request | None = None
    uniform: np.ndarray | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Prefix:
    """A fed prompt that later sessions may copy, while its holder lives and the weights are the same."""

    holder: str
    slot: int
    version: int
    tails: Tails


class Engine:
    """Synchronous core; a service owns it and calls ``step`` from one thread."""

    def __init__(self, model: PolicyModel, version: int, digest: str, config: EngineConfig) -> None:
        self.config = config
        self.version, self.digest = version, digest
        self.model = model.eval()
        dtype = torch_dtype(config.dtype)
        for p in model.parameters():  # buffers (rotary tables) stay fp32
            p.data, p.requires_grad = p.data.to(dtype), False
        self.span = min(config.max_context, model.config.max_positions)
        self.cache = KVCache(model.config, config.slots, self.span, dtype)
        self.free = list(range(config.slots))[::-1]  # lowest first: attention reads up to the highest in use
        self.sessions: dict[str, _Session] = {}
        self.queue: deque[Request] = deque()
        self.prefixes: dict[tuple[int, ...], _Prefix] = {}
        self.pending: tuple[dict[str, Tensor], int, str] | None = None
        self.counters = {"prefill": 0, "reused": 0, "sampled": 0, "steps": 0, "swaps": 0, "busy_s": 0.0}

    def submit(self, request: Request) -> None:
        """Queues a turn. Raises ValueError when the session is still sampling or the request is empty."""
        session = self.sessions.get(request.session)
        queued = any(r.session == request.session for r in self.queue)
        if queued or (session is not None and session.request is not None):
            raise ValueError(f"session {request.session} already has a request in flight")
        if not request.new_ids and (session is None or not session.waiting):
            raise ValueError("a new session needs at least one token")
        self.queue.append(request)

    def close(self, name: str) -> None:
        """Frees a session's slot and drops its queued request; unknown names are ignored (idempotent)."""
        self.queue = deque(r for r in self.queue if r.session != name)
        session = self.sessions.pop(name, None)
        if session is not None:
            self.free.append(session.slot)
            self.prefixes = {k: v for k, v in self.prefixes.items() if v.holder != name}

    def load(self, state: dict[str, Tensor], version: int, digest: str) -> None:
        """Takes new weights; they are swapped in before the next step's first product, requests stay alive."""
        self.pending = (state, version, digest)

    @property
    def idle(self) -> bool:
        running = any(s.request is not None for s in self.sessions.values())
        return not running and not any(self.free or r.session in self.sessions for r in self.queue)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One engine step; returns the requests that finished in it."""
        t0 = time.perf_counter()
        if self.pending is not None:
            self._swap()
        self._admit()
        done = self._prefill()
        done += self._decode()
        self.counters["steps"] += 1
        self.counters["busy_s"] += time.perf_counter() - t0
        return done

    def _swap(self) -> None:
        assert self.pending is not None
        state, self.version, self.digest = self.pending
        self.pending = None
        own = self.model.state_dict()
        if own.keys() != state.keys():
            raise ValueError("the new weights are of another model")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.counters["swaps"] += 1

    def _admit(self) -> None:
        """Gives queued requests their session's slot, or a free one; those without a slot stay queued, in order."""
        kept: deque[Request] = deque()
        while self.queue:
            request = self.queue.popleft()
            session = self.sessions.get(request.session)
            if session is None:
                if not self.free:
                    kept.append(request)
                    continue
                session = self.sessions[request.session] = _Session(self.free.pop())
                self.cache.clear_tail(session.slot)
            session.request = request
            session.uniform = uniforms(request.seed, request.sampling.max_tokens)
            session.waiting.extend(request.new_ids)
            session.ids, session.logprobs, session.versions = [], [], []
        self.queue = kept

    def _prefill(self) -> list[Completion]:
        """Feeds waiting tokens, all but each session's last: decode feeds that one and samples from it."""
        done: list[Completion] = []
        by_width: dict[int, list[tuple[str, _Session]]] = {}
        prompts: set[tuple[int, ...]] = set()
        for name, s in self.sessions.items():
            if s.request is None or len(s.waiting) <= 1:
                continue
            if s.length + len(s.waiting) > self.span:
                done.append(self._finish(s, "context"))
                continue
            prompt = tuple(s.waiting[:-1]) if s.length == 0 else None
            if prompt is not None and (prompt in prompts or self._copy_prefix(prompt, s)):
                continue  # copied, or to be copied next step from the row that is fed in this one
            by_width.setdefault(_width_of(len(s.waiting) - 1), []).append((name, s))
            if prompt is not None:
                prompts.add(prompt)
        left = self.config.prefill_tokens
        for width, rows in sorted(by_width.items()):
            rows.sort(key=lambda row: row[1].length)  # a call reads as far back as its longest row
            most = max(1, PREFILL_CALL_TOKENS // width)
            for start in range(0, len(rows), most):
                part = rows[start : start + most]
                if left < self.config.prefill_tokens and left < width * len(part):
                    break
                left -= width * len(part)
                self._feed(part, width)
        return done

    def _feed(self, rows: list[tuple[str, _Session]], width: int) -> None:
        new_ids = [s.waiting[:-1] for _, s in rows]
        self.cache.feed(self.model, [s.slot for _, s in rows], [s.length for _, s in rows], new_ids, width)
        for (name, s), ids in zip(rows, new_ids, strict=True):
            if s.length == 0:
                self.prefixes[tuple(ids)] = _Prefix(name, s.slot, self.version, self.cache.tails(s.slot))
            s.length += len(ids)
            s.waiting = s.waiting[-1:]
            self.counters["prefill"] += len(ids)

    def _copy_prefix(self, prompt: tuple[int, ...], s: _Session) -> bool:
        """Fills a fresh session's cache from a live one that was fed the same prompt under these weights."""
        prefix = self.prefixes.get(prompt)
        if prefix is None:
            return False
        if prefix.version != self.version:
            del self.prefixes[prompt]
            return False
        self.cache.copy_prefix(prefix.slot, s.slot, len(prompt), prefix.tails)
        s.length, s.waiting = len(prompt), s.waiting[-1:]
        self.counters["reused"] += len(prompt)
        return True

    def _decode(self) -> list[Completion]:
        """One token for every session whose prompt is fed."""
        rows = [s for s in self.sessions.values() if s.request is not None and len(s.waiting) == 1]
        done = [self._finish(s, "context") for s in rows if s.length + 1 > self.span]
        rows = [s for s in rows if s.request is not None]
        if not rows:
            return done
        slots, starts = [s.slot for s in rows], [s.length for s in rows]
        x_BD = self.cache.feed(self.model, slots, starts, [s.waiting for s in rows], 1)
        temperature_B = torch.tensor([s.request.sampling.temperature for s in rows])  # type: ignore[union-attr]
        uniform_B = torch.tensor([s.uniform[len(s.ids)] for s in rows])  # type: ignore[index]
        ids_B, logprob_B = sample(self.model.logits(x_BD), temperature_B, uniform_B)
        self.counters["sampled"] += len(rows)
        for s, token, logprob in zip(rows, ids_B.tolist(), logprob_B.tolist(), strict=True):
            assert s.request is not None
            s.length += 1
            s.waiting = [token]  # canonical, fed at the next step or with the session's next turn
            s.ids.append(token)
            s.logprobs.append(logprob)
            s.versions.append(self.version)
            if token in s.request.sampling.stop_ids:
                done.append(self._finish(s, "stop"))
            elif len(s.ids) >= s.request.sampling.max_tokens:
                done.append(self._finish(s, "length"))
        return done

    def _finish(self, s: _Session, reason: str) -> Completion:
        assert s.request is not None
        name = s.request.session
        s.request = None
        return Completion(name, tuple(s.ids), tuple(s.logprobs), tuple(s.versions), reason)
