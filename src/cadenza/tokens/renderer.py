"""The compact chat format: one special token opens a part, ``<|end|>`` closes it.

    <|bos|><|user|>TEXT<|end|>                                     prompt
    <|think|>TEXT<|end|><|call|>NAME ARGS<|end|>                   the model, thought optional
    <|output|>TEXT<|end|>                                          a tool's result
    <|final|>TEXT<|end|>                                           the model's closing message
    <|user|>summarize<|end|>                                       the harness asks for a summary
    <|reserved_0|>TEXT<|end|>                                      the model's summary, a thought before it optional

After a prompt or an output the model samples its own role token; sampling stops after the ``<|end|>`` of a call
or of a final. Tools are not described in the prompt: the demo model knows them from its demonstrations.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from cadenza.core.types import TokenKind
from cadenza.tokens.actions import Action, BrokenCall, Call, Final, Parsed, Summary, parse_call
from cadenza.tokens.tokenizer import SPECIALS, Tokenizer


class CompactRenderer:
    """Renders what is new and parses what was sampled. Ids already in a context are never rendered again."""

    name = "compact/2"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bos, self._user = tokenizer.id("<|bos|>"), tokenizer.id("<|user|>")
        self._think, self._call = tokenizer.id("<|think|>"), tokenizer.id("<|call|>")
        self._output, self._final = tokenizer.id("<|output|>"), tokenizer.id("<|final|>")
        self._summary = tokenizer.id("<|reserved_0|>")
        self.end_id = tokenizer.id("<|end|>")
        self._kind_of_role = {
            self._think: TokenKind.THINK,
            self._call: TokenKind.CALL,
            self._final: TokenKind.FINAL,
        }
        #: Names format and tokenizer; goes into ``Segment.digests["renderer"]``.
        self.digest: str = hashlib.sha256(f"{self.name}:{tokenizer.digest}".encode()).hexdigest()[:16]

    def render_prompt(self, text: str) -> tuple[list[int], list[int]]:
        """Ids and kinds (all OTHER) of the user's message, ``<|bos|>`` included."""
        ids = [self._bos, self._user, *self.tokenizer.encode(text), self.end_id]
        return ids, [int(TokenKind.OTHER)] * len(ids)

    def render_output(self, text: str) -> tuple[list[int], list[int]]:
        """Ids and kinds (all OUTPUT) of a tool's result."""
        ids = [self._output, *self.tokenizer.encode(text), self.end_id]
        return ids, [int(TokenKind.OUTPUT)] * len(ids)

    def render_note(self, text: str) -> tuple[list[int], list[int]]:
        """Ids and kinds (all OTHER) of what the harness says in the middle of a context."""
        ids = [self._user, *self.tokenizer.encode(text), self.end_id]
        return ids, [int(TokenKind.OTHER)] * len(ids)

    def render_query(self) -> tuple[list[int], list[int]]:
        """The request for a summary. Short: the model has learned what is meant."""
        return self.render_note("summarize")

    def render_summary(self, text: str) -> tuple[list[int], list[int]]:
        """Ids and kinds (all OTHER) of a summary where it is carried over: nobody samples it there."""
        ids = [self._summary, *self.tokenizer.encode(text), self.end_id]
        return ids, [int(TokenKind.OTHER)] * len(ids)

    def parse_summary(self, sampled_ids: Sequence[int]) -> Summary | BrokenCall:
        """Reads a turn that answers the query; never raises."""
        ids = list(sampled_ids)
        think: str | None = None
        if ids and ids[0] == self._think:
            part, ids = self._cut(ids)
            text = BrokenCall("no_end", "unfinished") if part is None else self._text(part)
            if isinstance(text, BrokenCall):
                return text
            think = text
        if not ids or ids[0] != self._summary:
            return BrokenCall("no_role", "no summary")
        part, rest = self._cut(ids)
        if part is None or rest:
            return BrokenCall("no_end" if part is None else "trailing", "not one summary")
        text = self._text(part)
        return text if isinstance(text, BrokenCall) else Summary(text, think)

    def render_action(self, action: Action | Summary) -> list[int]:
        """Ids of an action as a model would sample them; ``parse`` gives the action back."""
        ids: list[int] = []
        if action.think is not None:
            ids += [self._think, *self.tokenizer.encode(action.think), self.end_id]
        if isinstance(action, Call):
            ids += [self._call, *self.tokenizer.encode(action.text())]
        elif isinstance(action, Summary):
            ids += [self._summary, *self.tokenizer.encode(action.text)]
        else:
            ids += [self._final, *self.tokenizer.encode(action.text)]
        return [*ids, self.end_id]

    def kinds_of_sampled(self, ids: Sequence[int]) -> list[int]:
        """One of THINK, CALL, FINAL for each sampled id. Tokens outside any part count as CALL: a broken one."""
        kinds: list[int] = []
        kind = TokenKind.CALL
        for i in ids:
            kind = self._kind_of_role.get(i, kind)
            kinds.append(int(kind))
            if i == self.end_id:
                kind = TokenKind.CALL
        return kinds

    def turn_ends(self, ids: Sequence[int]) -> bool:
        """Whether sampling stops after ``ids``, the turn so far: its last id is ``<|end|>`` and closes no thought."""
        if not ids or ids[-1] != self.end_id:
            return False
        role = next((i for i in reversed(ids[:-1]) if i in self._kind_of_role or i == self.end_id), None)
        return role != self._think

    def parse(self, sampled_ids: Sequence[int]) -> Parsed:
        """Reads one sampled turn; never raises, whatever the ids are."""
        ids = list(sampled_ids)
        think: str | None = None
        if ids and ids[0] == self._think:
            part, ids = self._cut(ids)
            if part is None:
                return Parsed(BrokenCall("no_end", "unfinished"))
            text = self._text(part)
            if isinstance(text, BrokenCall):
                return Parsed(text)
            think = text
        if ids and ids[0] == self._think:
            return Parsed(BrokenCall("two_thoughts", "two thoughts in one turn"), think)
        if not ids or ids[0] not in (self._call, self._final):
            return Parsed(BrokenCall("no_role", "neither call nor final"), think)
        is_call = ids[0] == self._call
        part, rest = self._cut(ids)
        if part is None:
            return Parsed(BrokenCall("no_end", "unfinished"), think)
        if rest:
            return Parsed(BrokenCall("trailing", "text after the end"), think)
        text = self._text(part)
        if isinstance(text, BrokenCall):
            return Parsed(text, think)
        action = parse_call(text) if is_call else Final(text)
        if think is not None and not isinstance(action, BrokenCall):
            action = dataclasses.replace(action, think=think)
        return Parsed(action, think)

    def _cut(self, ids: list[int]) -> tuple[list[int] | None, list[int]]:
        """Splits a part at its end: (ids between role and end, ids after), or (None, []) when there is no end."""
        try:
            stop = ids.index(self.end_id)
        except ValueError:
            return None, []
        return ids[1:stop], ids[stop + 1 :]

    def _text(self, ids: list[int]) -> str | BrokenCall:
        if any(0 <= i < len(SPECIALS) for i in ids):
            return BrokenCall("stray_special", "special token inside the text")
        try:
            return self.tokenizer.decode_strict(ids)
        except ValueError:
            return BrokenCall("not_utf8", "not text")
