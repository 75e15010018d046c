"""The embedded engine: continuous batching over a slotted key-value cache, weights swapped between two steps.

One ``step`` reads top to bottom: swap weights if new ones wait; give queued requests a slot; choose the tokens to
feed, one of every decoding row and as many of waiting prompts and tool results as the budget allows; one forward
pass over all of them; sample. A session keeps its slot, and so its cached keys and values, between the turns of one
rollout. Members of a group that have said the same so far get the same tool results: whoever is fed one first, the
others copy from its cache, as they do with the prompt.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cadenza.core.errors import TrainingDiverged
from cadenza.inference.cache import Tails
from cadenza.inference.forward import Forward, Rows
from cadenza.inference.requests import Completion, EngineConfig, Request
from cadenza.inference.sampling import sample, uniforms
from cadenza.inference.speculative import Drafter, held
from cadenza.model.digest import weights_digest
from cadenza.model.transformer import PolicyModel


def torch_dtype(name: str) -> torch.dtype:
    """``auto``: bfloat16 where the CPU multiplies it in hardware, else float32."""
    if name == "auto":
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


# A history: its tokens, and which weights made which part of its cache. Where both are equal, so are keys and values.
_Key = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]


@dataclass
class _Session:
    slot: int
    tokens: list[int] = field(default_factory=list)  # those whose keys and values are cached
    runs: tuple[tuple[int, int], ...] = ()  # (first position, version of the weights) of what is cached
    waiting: list[int] = field(default_factory=list)  # canonical tokens not fed yet
    turn: int = 0  # tokens cached when this turn came
    told: int = 0  # tokens whose experts a completion has told
    asked: bool = False  # whether somebody was looked for who was fed this turn's tokens
    key: _Key | None = None  # under which others may copy them once they are fed
    draft: list[int] = field(
        default_factory=list
    )  # guesses for the tokens after ``waiting``, when that is one
    request: Request | None = None
    uniform: np.ndarray | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)  # version -> digest, of those in ``versions``

    @property
    def length(self) -> int:
        """Tokens cached."""
        return len(self.tokens)

    def under(self, version: int) -> tuple[tuple[int, int], ...]:
        """``runs`` with what would be fed next under ``version``."""
        return (
            self.runs if self.runs and self.runs[-1][1] == version else (*self.runs, (self.length, version))
        )


@dataclass(frozen=True)
class _Prefix:
    """A history that others may copy while its holder lives."""

    holder: str
    slot: int
    tails: Tails


class Engine:
    """Synchronous core; a service owns it and calls ``step`` from one thread."""

    def __init__(self, model: PolicyModel, version: int, config: EngineConfig) -> None:
        self.config = config
        self.version = version
        self.model = model.eval()
        dtype = torch_dtype(config.dtype)
        for p in model.parameters():  # buffers (rotary tables) stay fp32
            p.data, p.requires_grad = p.data.to(dtype), False
        self.digest = weights_digest(model.state_dict())  # of what is served, not of what was asked for
        self.span = min(config.max_context, model.config.max_positions)
        draft = len(model.mtp) if config.draft_tokens == "auto" else config.draft_tokens
        most = max(config.step_tokens, config.slots + config.draft_rows * draft)
        self.forward = Forward(model, config.slots, self.span, most, dtype)
        self.cache = self.forward.cache
        self.drafter = Drafter(model, draft) if draft else None
        with torch.inference_mode():  # compiles the kernels now, and not while a first user waits
            self.forward([0], Rows.of([0], [1], [0]), [0])
        self.cache.clear_tail(0)
        self.free = list(range(config.slots))[::-1]
        self.sessions: dict[str, _Session] = {}
        self.queue: deque[Request] = deque()
        self.prefixes: dict[_Key, _Prefix] = {}
        # At most one, the newest: taking it and putting the next may happen in two threads at once.
        self.pending: deque[tuple[dict[str, Tensor], int]] = deque(maxlen=1)
        self.counters: dict[str, int] = dict.fromkeys(
            ("prefill", "reused", "sampled", "steps", "swaps", "guessed", "held"), 0
        )
        self.swap_s = 0.0  # in which nothing was decoded
        for k in range(1, draft + 1):  # by place: how many k-th guesses there were, and held
            self.counters |= {f"guessed_{k}": 0, f"held_{k}": 0}

    def submit(self, request: Request) -> None:
        """Queues a turn. Raises ValueError when the session is still sampling or has nothing to be fed, or a token is
        not in the vocabulary."""
        last = self.model.config.vocab_size - 1
        if any(not 0 <= token <= last for token in request.new_ids):
            raise ValueError(f"session {request.session}: a token is not in 0..{last}")
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

    def load(self, state: dict[str, Tensor], version: int) -> None:
        """Takes new weights; they are swapped in before the next step's first product, requests stay alive."""
        self.pending.append((state, version))

    @property
    def idle(self) -> bool:
        running = any(s.request is not None for s in self.sessions.values())
        return not running and not any(self.free or r.session in self.sessions for r in self.queue)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One engine step; returns the requests that finished in it."""
        if self.pending:
            begun = time.perf_counter()
            self._swap()
            self.swap_s += time.perf_counter() - begun
        self._admit()
        done = self._end_full()
        chosen = self._choose()
        if chosen:
            done += self._feed(chosen)
        self.counters["steps"] += 1
        return done

    def _swap(self) -> None:
        state, self.version = self.pending.pop()
        own = self.model.state_dict()
        if own.keys() != state.keys():
            raise ValueError("the new weights are of another model")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.digest = weights_digest(own)
        self.forward.refresh()
        for s in self.sessions.values():
            if s.key is not None:  # looked up under the old weights; partly fed under them nobody may copy it
                s.key, s.asked = None, s.length > s.turn
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
            session.turn, session.asked, session.key, session.draft = session.length, False, None, []
            session.ids, session.logprobs, session.versions, session.weights = [], [], [], {}
        self.queue = kept

    def _end_full(self) -> list[Completion]:
        """Ends requests whose session has no room for what waits."""
        running = [s for s in self.sessions.values() if s.request is not None]
        return [self._finish(s, "context") for s in running if s.length + len(s.waiting) > self.span]

    def _choose(self) -> list[tuple[_Session, int]]:
        """Sessions to feed in this step, with the number of tokens that wait: decoding rows first, so that no prompt,
        however long, makes them wait; prompts are cut where the budget ends."""
        running = [s for s in self.sessions.values() if s.request is not None]
        chosen = [(s, 1) for s in running if len(s.waiting) == 1]
        left = self.config.step_tokens - sum(1 + len(s.draft) for s, _ in chosen)
        fed = {s.key for s in running if s.key is not None}
        for s in running:
            if len(s.waiting) == 1:
                continue
            count = len(s.waiting)
            if not s.asked:
                # All but the last token, which every member of a group feeds itself and samples from.
                key = ((*s.tokens, *s.waiting[:-1]), s.under(self.version))
                if key in fed or self._copy_prefix(key, s):
                    continue  # copied, or to be copied from the row that is being fed
                s.key, s.asked = key, True
                fed.add(key)
            if s.key is not None:
                count -= 1
            count = min(count, left)
            if count > 0:
                chosen.append((s, count))
                left -= count
        return chosen

    def _feed(self, chosen: list[tuple[_Session, int]]) -> list[Completion]:
        """One forward pass; samples for every session that has nothing left to feed: a token, or as many as its guesses
        held for and one more."""
        fed = [s.waiting[:count] + s.draft for s, count in chosen]
        rows = Rows.of([s.slot for s, _ in chosen], [len(f) for f in fed], [s.length for s, _ in chosen])
        ids = [token for tokens in fed for token in tokens]
        sampling: list[int] = []  # indices in ``chosen``
        wanted: list[int] = []
        at = 0
        for i, (s, count) in enumerate(chosen):
            at += len(fed[i])
            if count == len(s.waiting):
                sampling.append(i)
                wanted += range(at - 1 - len(s.draft), at)
        watched = [i for i, (s, _) in enumerate(chosen) if s.draft]
        logits_BV = self.forward(ids, rows, wanted, watched)
        self.counters["prefill"] += sum(count for _, count in chosen) - len(sampling)
        for s, count in chosen:
            s.runs = s.under(self.version)
            s.tokens += s.waiting[:count]
            s.waiting = s.waiting[count:]
            if s.key is not None and len(s.waiting) == 1:
                self._hold(s.key, s, self.cache.tails(s.slot))
                s.key = None
        return self._sample([(i, chosen[i][0]) for i in sampling], rows, logits_BV) if sampling else []

    def _copy_prefix(self, key: _Key, s: _Session) -> bool:
        """Fills a session's cache from a live one that was fed the same history under the same weights."""
        prefix = self.prefixes.get(key)
        if prefix is None:
            return False
        tokens, runs = key
        self.cache.copy_prefix(prefix.slot, s.slot, s.length, len(tokens), prefix.tails)
        self.counters["reused"] += len(tokens) - s.length
        s.tokens, s.runs, s.waiting, s.asked = list(tokens), runs, s.waiting[-1:], True
        self._hold(key, s, prefix.tails)  # who copied last lives longest
        return True

    def _hold(self, key: _Key, s: _Session, tails: Tails) -> None:
        assert s.request is not None
        self.prefixes[key] = _Prefix(s.request.session, s.slot, tails)

    def _sample(
        self, sampling: list[tuple[int, _Session]], rows: Rows, logits_BV: Tensor
    ) -> list[Completion]:
        """Draws at every wanted place and keeps what the guesses, which the later places were fed, turn out to allow.
        ``sampling``: rows and their sessions."""
        done: list[Completion] = []
        temperature = [s.request.sampling.temperature for _, s in sampling for _ in range(1 + len(s.draft))]  # type: ignore[union-attr]
        uniform = [s.uniform[len(s.ids) + k] for _, s in sampling for k in range(1 + len(s.draft))]  # type: ignore[index]
        ids_B, logprob_B = sample(logits_BV, torch.tensor(temperature), torch.tensor(uniform))
        if not logprob_B.isfinite().all():
            raise TrainingDiverged(
                f"version {self.version} of the policy gives log-probabilities that are no numbers",
                "go on from an earlier checkpoint, with a lower learning rate",
            )
        ids, logprobs, at = ids_B.tolist(), logprob_B.tolist(), 0
        last: list[tuple[_Session, int]] = []  # with the place that the last token was drawn from
        for row, s in sampling:
            assert s.request is not None
            drawn = ids[at : at + 1 + len(s.draft)]
            count = held(s.draft, drawn)
            right, reason = count - 1, ""
            for k, token in enumerate(drawn[:count]):
                s.ids.append(token)
                s.logprobs.append(logprobs[at + k])
                s.versions.append(self.version)
                if token in s.request.sampling.stop_ids:
                    reason = "stop"
                elif len(s.ids) >= s.request.sampling.max_tokens:
                    reason = "length"
                if reason:
                    count = k + 1
                    break
            s.weights[self.version] = self.digest
            if s.draft:
                # Where the turn ended among the guesses, those after the end were never put to the test.
                judged = min(count, len(s.draft)) if reason else len(s.draft)
                self._count(judged, min(right, judged))
                s.tokens += s.draft[: count - 1]
                self.forward.rewind(row, rows, count)
                s.draft = []
            self.counters["sampled"] += count
            s.waiting = [drawn[count - 1]]  # canonical, fed at the next step or with the session's next turn
            if reason:
                done.append(self._finish(s, reason))
            else:
                last.append((s, at + count - 1))
            at += len(drawn)
        self._guess(last)
        return done

    def _count(self, guessed: int, held: int) -> None:
        self.counters["guessed"] += guessed
        self.counters["held"] += held
        for k in range(1, guessed + 1):
            self.counters[f"guessed_{k}"] += 1
            self.counters[f"held_{k}"] += k <= held

    def _guess(self, last: list[tuple[_Session, int]]) -> None:
        """Guesses ahead for the sessions that go on decoding, unless there are too many for it to pay."""
        if self.drafter is None or not last or len(last) > self.config.draft_rows:
            return
        sessions = [s for s, _ in last]
        numbers = []
        for s in sessions:
            # The draw that follows the guesses needs a number and a place too.
            room = min(self.span - s.length - 1, s.request.sampling.max_tokens - len(s.ids) - 1)  # type: ignore[union-attr]
            numbers.append(s.uniform[len(s.ids) : len(s.ids) + max(0, room)])  # type: ignore[index]
        if not any(map(len, numbers)):
            return
        drafts = self.drafter.guess(
            self.forward.states_BD[[place for _, place in last]],
            [s.waiting[0] for s in sessions],
            [s.request.sampling.temperature for s in sessions],  # type: ignore[union-attr]
            numbers,
        )
        for s, draft in zip(sessions, drafts, strict=True):
            s.draft = draft

    def _finish(self, s: _Session, reason: str) -> Completion:
        assert s.request is not None
        name = s.request.session
        s.request = None
        routes_TLJ = self.cache.routes_RSLJ[s.slot, s.told : s.length].copy()
        s.told = s.length
        return Completion(
            name, tuple(s.ids), tuple(s.logprobs), tuple(s.versions), reason,
            weights=s.weights, routes_TLJ=routes_TLJ,
        )  # fmt: skip
