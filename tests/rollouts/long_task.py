"""A task of 46 modules with a slip in each, and the record of one run of 170 turns and more that mends them all.

The scripted expert made the record through the production agent in a real sandbox: with summaries and many contexts,
as Cursor reports of long self-summarized runs. ``python tests/rollouts/long_task.py`` makes it
again when prompts, tools or limits were changed on purpose.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

from cadenza.core.types import Rollout, Task
from cadenza.harness import Agent, Limits, demo_tools
from cadenza.harness.windows import WindowConfig
from cadenza.pipelines.base_stage import shipped_base
from cadenza.rollouts import ExpertConfig, ScriptedExpert, run_trial
from cadenza.rollouts.record import to_bytes
from cadenza.sandbox import LocalBackend
from cadenza.tasks.directory import TaskFiles, write_task
from cadenza.tasks.patch import make_patch
from cadenza.tokens import CompactRenderer, Sampling, Tokenizer, TokenSession

RECORD = Path(__file__).parent / "long_rollout.cdzr"
MODULES = 46
LIMITS = Limits(
    max_turns=400, max_tokens_per_turn=256, max_context_tokens=1536, max_output_tokens=384, wall_s=240.0,
    windows=WindowConfig(mode="summary", trigger=704, most=200),
)  # fmt: skip
WORDS = ("amount", "count", "price", "score", "weight")


def long_task(folder: Path) -> Task:
    """The task, which is the same at every call."""
    rng = random.Random("long task")
    broken: dict[str, bytes] = {}
    mended: dict[str, bytes | None] = {}
    visible: dict[str, bytes] = {}
    hidden: dict[str, bytes] = {}
    for number in range(MODULES):
        name = f"part{number:02d}"
        function = f"{name}_{rng.choice(WORDS)}"
        low, step = rng.randint(1, 9), rng.randint(2, 9)
        source = f"def {function}(value):\n    return max(value * {step} {{}} {low}, 0)\n"
        broken[f"{name}.py"], mended[f"{name}.py"] = source.format("+").encode(), source.format("-").encode()
        for tests, path, value in (
            (visible, f"test_{name}.py", 7),
            (hidden, f"test_hidden_{number:02d}.py", 11),
        ):
            test = f"from {name} import {function}\n\n\ndef test_{name}():\n"
            tests[path] = f"{test}    assert {function}({value}) == {value * step - low}\n".encode()
    instruction = "Each part adds what it should take off: make every test pass.\n"
    files = TaskFiles(
        instruction, broken | visible, hidden, make_patch(broken, mended),
        {"split": "long", "ambiguity": 0, "created_at": "2026-01-01T00:00:00+00:00", "family": "wrong_operator",
         "expected_tests": [f"{path}::test_part{path[-5:-3]}" for path in (*visible, *hidden)]},
    )  # fmt: skip
    return write_task(files, folder)


def renderer() -> CompactRenderer:
    """That of the shipped base, whose tokenizer does not change with the tests' corpus."""
    return CompactRenderer(Tokenizer.load(shipped_base()))


async def run(task: Task, session: TokenSession, renderer: CompactRenderer) -> Rollout:
    """One trial in a sandbox of its own backend."""
    backend = LocalBackend()
    await backend.start()
    try:
        agent = Agent(renderer, demo_tools(test_timeout_s=20), LIMITS)
        return await run_trial(task, session, backend, agent, Sampling(max_tokens=256), 0, "long")
    finally:
        await backend.aclose()


def main() -> int:
    """Makes the record. Exit code 1 when the run is not what it is kept for."""
    with tempfile.TemporaryDirectory() as folder:
        task, plain = long_task(Path(folder)), renderer()
        config = ExpertConfig(mistake=0.0, tests_between_files=1.0, grep_although_named=1.0)
        rollout = asyncio.run(run(task, ScriptedExpert.for_task(task, plain, 0, config), plain))
    turns = sum(len(s.turns) for s in rollout.segments)
    print(f"reward {rollout.reward}, {turns} turns, {len(rollout.segments)} contexts", file=sys.stderr)
    if rollout.reward != 1.0 or turns < 170:
        return 1
    rollout.timings = {}
    RECORD.write_bytes(to_bytes(rollout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
