"""The scripted expert: a TokenSession that knows the gold patch and works through the same agent as a model.

It looks before it edits, and only acts on what it has seen: a file is opened because the prompt, a listing, a search
or a failing test led there, so that a model that imitates it learns steps it can take without the patch. The route
varies with the seed. In a share of runs it first errs, once or more: it writes the function as it was, or with another
mistake, and sees that the tests still fail. Each such turn carries the note ``mistake`` so that training can leave it
out of the loss. What follows teaches to go on differently: a policy that has only seen runs without errors writes the
same over and over, and no reward can teach it what it never tries.

Asked for a summary it says what it has found out: where the mistake is, what is mended, how the tests went. In the next
context it reads a file again before it writes into it, unless a copied step shows the file. What a list of reports asks
for it remembers in its summaries; without them it reads the list again when the present context does not show it.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from cadenza.core.config import StrictConfig
from cadenza.core.types import Task
from cadenza.harness.definitions import Node, definitions
from cadenza.harness.tools.todo_write import MOST_CHARACTERS
from cadenza.rollouts.gold_edits import DefEdit, gold_edits
from cadenza.rollouts.mistakes import wrong_definition
from cadenza.tasks.issues import REPORTS
from cadenza.tasks.patch import apply_patch
from cadenza.tokens import Call, CompactRenderer, Sampled, Sampling, Summary

SCRIPTED_VERSION = -1  # the policy version of scripted tokens; no trained policy has it
MISTAKE = "mistake"
_MOST_READS = 8  # of one long file
_MOST_LINES = 4  # of a thought's difference
_SPECIAL = re.compile(r"<\|[a-z_0-9]+\|>")


class ExpertConfig(StrictConfig):
    """Shares of runs (0..1) that take each optional step. Where a list of reports says what to do, only ``think``,
    ``todo`` and ``tests_last`` count.

    ``think``: share of repairs before which it thinks: what it is to write, where, and what that is for.
    ``think_after_mistake``: share of those that follow a mistake, where it also thinks which lines are wrong and
    what they should be. ``todo``: keeps a list of what is to be mended. ``list_dir_first``: looks at the folder
    before anything else. ``tests_first``: runs the tests before reading. ``grep_although_named``: searches although
    the issue names the place. ``tests_between_files``: runs the tests after the first of two files is mended.
    ``tests_last``: runs the tests before it finishes. ``mistake``: errs before the repair, where the code allows
    it. ``mistake_other_def``: share of those that write a definition that was right, of the same file or another,
    and take it back; the rest write the one to repair. ``mistake_unchanged``: share of the mistakes that write a
    definition as it is. ``mistake_elsewhere``: share of the others that leave the bug and put a slip on another
    line; the rest have the right line wrong. ``mistake_again``: share of mistakes in the one to repair followed by
    one more; ``read_again_after_mistake``: share of mistakes that changed the file after which it reads it again.
    """

    think: float = 0.0
    think_after_mistake: float = 0.0
    todo: float = 0.0
    list_dir_first: float = 0.3
    tests_first: float = 0.5
    grep_although_named: float = 0.25
    tests_between_files: float = 0.5
    tests_last: float = 0.95
    mistake: float = 0.5
    mistake_other_def: float = 0.4
    mistake_again: float = 0.3
    mistake_elsewhere: float = 0.5
    mistake_unchanged: float = 0.4
    read_again_after_mistake: float = 0.1
    most_wrong_files: int = 2  # opened before the right one when nothing leads to it


class ScriptedExpert:
    """Plays one run of one task. Log-probs are 0 (it is certain), the version is ``SCRIPTED_VERSION``."""

    def __init__(
        self,
        renderer: CompactRenderer,
        base: Mapping[str, bytes],
        patch: str,
        seed: int | str,
        config: ExpertConfig | None = None,
    ) -> None:
        """Raises PatchRefused or ValueError for a patch that replace_def cannot express."""
        self._renderer = renderer
        self._base = base
        self._edits = gold_edits(base, apply_patch(dict(base), patch))
        self._rng = random.Random(f"expert:{seed}")
        self._config = config or ExpertConfig()
        self._seen = ""
        self._listed = self._tested = False
        self._note: str | None = None
        self._steps: Generator[Call, str, None] | None = None
        self._aim: tuple[str, str] | None = (
            None  # (path, definition) that it works on, once something led there
        )
        self._mended: list[str] = []
        self._erred = False  # its last repair was a mistake
        self._tests = ""  # the first line of the last result
        self._held = ""  # the result that came with the request for a summary
        self._unread: set[str] | None = None  # files the present context does not show; None in the first one
        self._here = ""  # all that the present context was given
        self._remaining: list[str] | None = (
            None  # how the reports still to be mended begin, once it knows them
        )
        self._summarized = False  # what is left stands in a summary
        self._waiting: Call | None = None  # the call that a file is read again for
        self._read_again = 0  # how often it was by now
        self._opened: set[str] = set()  # files that it has read

    @classmethod
    def for_task(
        cls, task: Task, renderer: CompactRenderer, seed: int, config: ExpertConfig | None = None
    ) -> ScriptedExpert:
        """The expert of a task directory, which must hold ``solution/patch.diff``."""
        patch = (task.directory / "solution" / "patch.diff").read_text(encoding="utf-8")
        return cls(
            renderer, read_tree(task.directory / "environment" / "repo"), patch, f"{task.id}:{seed}", config
        )

    async def sample(self, new_ids: list[int], sampling: Sampling) -> Sampled:
        """Renders the expert's next action; what it has seen is what the ids say and nothing else."""
        query, _ = self._renderer.render_query()
        self._note = None
        if new_ids[-len(query) :] == query:
            self._held = self._text(new_ids[: -len(query)])
            self._summarized = True
            action: Call | Summary = Summary(self._summary())
        else:
            action = self._next_here(new_ids)
        ids = self._renderer.render_action(action)
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return Sampled(
            ids, [0.0] * len(ids), [SCRIPTED_VERSION] * len(ids), "length" if cut else "stop", self._note
        )

    def renew(self) -> None:
        """The next context begins: what it shows of the files is seen with its first ids."""
        self._unread = set()
        self._here = ""

    def _text(self, ids: list[int]) -> str:
        return _SPECIAL.sub("", self._renderer.tokenizer.decode(ids))

    def _summary(self) -> str:
        """A short line for each thing to be mended, and two more at most."""
        lines = []
        if REPORTS in self._base:
            known = self._remaining is not None
            left = self._remaining if self._remaining is not None else _starts(self._held)
            lines += left or ["all fixed" if known else f"see {REPORTS}"]
        if self._aim is not None:
            path, name = self._aim
            lines.append(f"fix {name} in {path}")
        if self._mended:
            lines.append(f"fixed {' '.join(self._mended)}")
        if self._tests:
            lines.append(f"tests {self._tests}")
        return "\n".join(lines)

    def _next_here(self, new_ids: list[int]) -> Call:
        """The next call, after reading again what it would write into and the present context does not show."""
        text = self._text(new_ids)
        self._here += "\n" + _SPECIAL.sub("\n", self._renderer.tokenizer.decode(new_ids))
        if self._unread is not None and not self._unread:  # the first ids of a later context
            self._unread = {p for p in self._base if f"read_file {p}" not in text} | {""}
            _, copied, last = self._renderer.tokenizer.decode(new_ids).rpartition("<|output|>")
            text = last.removesuffix("<|end|>") if copied else self._held
        call, self._waiting = self._waiting or self._next(text), None
        path = call.args.split(" ")[0]
        if call.name == "read_file":
            self._opened.add(path)
            if self._unread:
                self._unread.discard(path)
        # A file that fills a context by itself is forgotten as soon as it is read: then it writes from memory.
        unread = self._unread or set()
        if call.name == "replace_def" and path in unread and self._read_again < _MOST_READS:
            unread.discard(path)
            self._waiting = call
            self._read_again += 1
            return Call("read_file", path)
        if call.name == "replace_def" and self._remaining is not None:
            self._remaining = [start for start in self._remaining if not start.startswith(f"- {path}, ")]
        self._read_again = 0
        return call

    def close(self) -> None:
        """Ends the play; a session of the engine would free its slot here."""
        if self._steps is not None:
            self._steps.close()

    def _next(self, text: str) -> Call:
        try:
            if self._steps is None:
                self._seen = text
                self._steps = self._work_off() if REPORTS in self._base else self._plan()
                return next(self._steps)
            return self._steps.send(text)
        except StopIteration:
            return Call("finish")

    def _plan(self) -> Generator[Call, str, None]:
        """The run: look around, then file by file find, read and edit, then test and finish."""
        config = self._config
        if self._happens(config.list_dir_first):
            yield from self._list()
        if self._happens(config.tests_first):
            yield from self._test()
        mistake = self._happens(config.mistake)
        listing = config.todo > 0 and self._happens(config.todo)
        for index, (path, edits) in enumerate(self._edits.items()):
            if index and self._happens(config.tests_between_files):
                yield from self._test()
            astray = mistake and self._happens(config.mistake_other_def)
            others = self._other_files(path) if astray else []
            if others:
                yield from self._err_elsewhere(self._rng.choice(others), "", unread=True)
            yield from self._find(path, edits[0])
            self._aim = (path, edits[0].name)
            names = ", ".join(edit.name for edit in edits)
            if listing:
                yield Call("todo_write", "", f"- fix {names} in {path}"[:MOST_CHARACTERS])
            yield from self._read(path, lambda shown, edits=edits: all(e.old in shown for e in edits))
            if astray and not others:
                yield from self._err_elsewhere(path, edits[0].name, unread=False)
            elif mistake and not astray and (yield from self._err(edits[0])):
                return  # no visible test saw the slip, so there is no reason to go on
            mistake = False  # in the first file only
            for edit in edits:
                yield self._repair(edit)
                self._mended.append(edit.name)
            self._aim = None
            if listing:
                yield Call("todo_write", "", f"x fix {names} in {path}"[:MOST_CHARACTERS])
        if self._happens(config.tests_last):
            yield from self._test()
        yield Call("finish")

    def _work_off(self) -> Generator[Call, str, None]:
        """The run where a list of reports says what is wrong and no test does: one after the other, in its order. It
        makes no mistakes, which nothing would show it."""
        listing = self._config.todo > 0 and self._happens(self._config.todo)
        starts = yield from self._consult()
        self._remaining = starts
        if listing:
            yield Call("todo_write", "", "\n".join(start[:MOST_CHARACTERS] for start in starts))
        for start in starts:
            path = start.removeprefix("- ").partition(", ")[0]
            if not _names(self._here, path):
                yield from self._consult()
            yield from self._read(
                path, lambda shown, path=path: all(e.old in shown for e in self._edits[path])
            )
            for edit in self._edits[path]:
                yield self._repair(edit)
            if listing:
                left = self._remaining or [f"x {start.removeprefix('- ')}"]
                yield Call("todo_write", "", "\n".join(item[:MOST_CHARACTERS] for item in left))
        if not (self._summarized or listing or (starts and starts[0] in self._here)):
            yield from self._consult()  # nothing else says that none is left
        if self._happens(self._config.tests_last):
            yield from self._test()
        yield Call("finish")

    def _repair(self, edit: DefEdit) -> Call:
        erred, self._erred = self._erred, False
        share = self._config.think_after_mistake if erred else self._config.think
        thinks = share > 0 and self._happens(share)
        return Call("replace_def", edit.path, edit.new, _thought(edit, erred) if thinks else None)

    def _consult(self) -> Generator[Call, str, list[str]]:
        """Reads the list of reports; how each begins."""
        return _starts((yield from self._read(REPORTS, lambda shown: False)))

    def _find(self, path: str, edit: DefEdit) -> Generator[Call, str, None]:
        """Steps until something seen leads to ``path``."""
        source = self._base[path].decode("utf-8")
        name = edit.name
        if self._mentions(path):
            if self._mentions(name) and self._happens(self._config.grep_although_named):
                yield from self._look_up(name, source)
            return
        sources = [p for p in sorted(self._base) if p.endswith(".py") and not _is_test(p)]
        if self._listed and sources == [path]:
            return
        if not self._mentions(name) and not self._tested:
            yield from self._test()
        if self._mentions(path):
            return
        if self._mentions(name):
            yield from self._look_up(name, source)
            return
        if not self._listed:
            yield from self._list()
        others = [p for p in sources if p != path and p not in self._edits and p not in self._opened]
        for other in others[: self._rng.randint(0, self._config.most_wrong_files)]:
            yield Call("read_file", other)

    def _read(self, path: str, enough: Callable[[str], bool]) -> Generator[Call, str, str]:
        """Reads the file, and on where a long file was cut, until it has seen enough; what it has seen."""
        shown, line = "", 1
        for _ in range(_MOST_READS):
            output = yield Call("read_file", path if line == 1 else f"{path} {line}")
            kept, cut, _ = output.rpartition("\n[cut: ")
            shown += f"{kept}\n" if cut else output
            if not cut or enough(shown):
                break
            line += kept.count("\n") + 1
        return shown

    def _look_up(self, name: str, source: str) -> Generator[Call, str, None]:
        keyword = "class" if re.search(rf"^\s*class {name}\b", source, re.M) else "def"
        self._seen += "\n" + (yield Call("grep", f"{keyword} {name}"))

    def _list(self) -> Generator[Call, str, None]:
        yield Call("list_dir")  # names every file, so it leads to none: not added to what was seen
        self._listed = True

    def _test(self) -> Generator[Call, str, str]:
        output = yield Call("run_tests")
        self._tested = True
        self._tests = output.partition("\n")[0][:60]
        self._seen += "\n" + output
        return output

    def _err(self, edit: DefEdit) -> Generator[Call, str, bool]:
        """Mistakes, where the code allows them, each up to where it is seen not to help. True when the tests passed all
        the same."""
        config = self._config
        written, tried = edit.old, {edit.new}
        while True:
            if written == edit.old and self._happens(config.mistake_unchanged):
                text = written
            else:
                elsewhere = self._happens(config.mistake_elsewhere)
                text = wrong_definition(edit.old, edit.new, self._rng, elsewhere)
                text = text or wrong_definition(edit.old, edit.new, self._rng, not elsewhere)
            if text is None or text in tried:  # the same mistake twice would teach to repeat oneself
                return False
            tried.add(text)
            self._note, self._erred = MISTAKE, True
            if (yield Call("replace_def", edit.path, text)) == "ok":
                written = text
                if (yield from self._test()).startswith("ok"):
                    return True
                if self._happens(config.read_again_after_mistake):  # unchanged it would show the same
                    yield Call("read_file", edit.path)
            if not self._happens(config.mistake_again):
                return False

    def _other_files(self, path: str) -> list[str]:
        """Where a run may go astray: half of the time in another file, if there is one with a definition."""
        if self._rng.random() < 0.5:
            return []
        sources = [p for p in sorted(self._base) if p.endswith(".py") and not _is_test(p)]
        return [p for p in sources if p not in (path, *self._edits) and self._definitions(p)]

    def _definitions(self, path: str, but: str = "") -> list[str]:
        """Texts of the functions and methods of a file, without those called ``but``."""
        source = self._base[path].decode("utf-8")
        return [d.text(source) for d in definitions(source) if not d.is_class and d.name != but]

    def _err_elsewhere(self, path: str, but: str, unread: bool) -> Generator[Call, str, None]:
        """Writes a definition that was right: as it is, or wrongly, sees that it does not help, and takes it back."""
        found = self._definitions(path, but)
        if not found:
            return
        text = self._rng.choice(found)
        unchanged = self._happens(self._config.mistake_unchanged)
        wrong = text if unchanged else wrong_definition(text, text, self._rng, elsewhere=True) or text
        if unread:
            self._note = MISTAKE
            yield Call("read_file", path)
        self._note, self._erred = MISTAKE, True
        if (yield Call("replace_def", path, wrong)) == "ok":
            yield from self._test()
            yield Call("replace_def", path, text)

    def _happens(self, share: float) -> bool:
        return self._rng.random() < share

    def _mentions(self, name: str) -> bool:
        return _names(self._seen, name)


def _thought(edit: DefEdit, erred: bool) -> str:
    """What is to be written and what it is for, as its docstring begins; after a mistake also a few lines of the
    difference, which needs a second look by then."""
    # A method under a heading: it is indented, and the lines of its strings perhaps not.
    source = f"if method:\n{edit.new}" if edit.new[0].isspace() else edit.new
    tree = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, Node))
    purpose = (ast.get_docstring(tree) or "").partition("\n")[0]
    lines = difflib.ndiff(edit.old.splitlines(), edit.new.splitlines()) if erred else []
    changed = [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "+-"]
    return "\n".join([f"{edit.name} in {edit.path}: {purpose}", *changed[:_MOST_LINES]])


def _starts(reports: str) -> list[str]:
    """Of the lines of a list of reports: ``- FILE, NAME``."""
    return re.findall(r"^(- [^,:\n]+, \w+):", reports, re.M)


def _names(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w/]){re.escape(name)}(?!\w)", text) is not None


def read_tree(root: Path) -> dict[str, bytes]:
    """Every regular file under ``root``, by its path relative to it, in sorted order."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    }


def _is_test(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.startswith("test_") or name == "conftest.py"
