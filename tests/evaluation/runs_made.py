"""A run directory with every part, drawn from seeded chance: what the report's tests and its screenshot read."""

from __future__ import annotations

import math
import random
from pathlib import Path

from cadenza.evaluation.report_inputs import (
    MetricWriter,
    RunInfo,
    Span,
    StageInfo,
    Trajectory,
    Turn,
    append_lines,
    write_run_info,
)
from cadenza.evaluation.result import EvalRecord, EvalResult, TaskFacts

FAMILIES = (
    "off_by_one", "wrong_operator", "swapped_arguments", "missing_return", "wrong_default", "shadowed_name",
    "boundary", "wrong_constant",
)  # fmt: skip
SKILL = {"base": -3.0, "sft": -0.5, "sft_continued": -0.4, "rl": 0.15}


def write_run(folder: Path, *, seeds=(0,), tasks: int = 60, samples: int = 8, policies=tuple(SKILL)) -> Path:
    write_run_info(folder, run_info(seeds))
    _write_metrics(folder)
    _write_timeline(folder)
    _write_trajectories(folder)
    for seed in seeds:
        for policy in policies:
            for suite, n, shift in (("heldout", tasks, 0.0), ("hard", tasks // 2, -1.2)):
                for temperature in (0.7, 0.0):
                    result = evaluation(
                        policy, suite, seed, temperature, n, samples if temperature else 1, shift
                    )
                    result.save(folder / "evaluations" / f"{policy}-{suite}-{temperature}-{seed}.json")
    return folder


def evaluation(policy, suite, seed, temperature, n, samples, shift=0.0, skill=None) -> EvalResult:
    facts, records = {}, []
    for i in range(n):
        hard = random.Random(f"task {suite} {i}").gauss(0, 1.6)
        unseen = suite == "heldout" and i % 5 == 0
        facts[f"{suite}-{i:03d}"] = TaskFacts(
            split=suite, family=("inverted_test" if unseen else FAMILIES[i % 8]), ambiguity=i % 3,
            edits=2 if suite == "hard" else 1, unseen=unseen,
        )  # fmt: skip
        chance = random.Random(f"{policy} {suite} {i} {seed} {temperature}")
        strength = (SKILL[policy] if skill is None else skill) + shift + hard - 0.5 * unseen
        p = 1 / (1 + math.exp(-strength))
        for s in range(samples):
            solved = chance.random() < p
            tokens = chance.randint(60, 160) + (0 if solved else 60)
            records.append(
                EvalRecord(
                    task_id=f"{suite}-{i:03d}", sample=s, solved=solved, tokens=tokens, turns=tokens // 25
                )
            )
    return EvalResult(
        policy=policy, suite=suite, suite_digest="s", harness_digest="h", temperature=temperature, seed=seed,
        samples=samples, tasks=facts, records=tuple(records), started_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def run_info(seeds) -> RunInfo:
    stages = [
        StageInfo(name="tasks", status="done", wall_s=41, detail={"tasks": "1,460", "families": 14}),
        StageInfo(name="cpt", status="done", wall_s=74, detail={"tokens": "0.9 M"}),
        StageInfo(
            name="sft", status="done", wall_s=231, detail={"tokens": "2.9 M", "trajectories": "14,200"}
        ),
        StageInfo(name="rl", status="done", wall_s=402, detail={"steps": 58, "rollouts": "7,424"}),
        StageInfo(name="eval", status="done", wall_s=66, detail={}),
    ]
    return RunInfo(
        name="demo", recipe="demo", seeds=seeds, started_at="2026-01-01T10:20:00+00:00", wall_s=838,
        command="cadenza train demo", commit="0123456789ab", stages=tuple(stages),
        config={"name": "demo", "stage": [{"name": "rl", "lr": 2e-4, "group": 8}, {"name": "sft", "lr": 0.015}]},
        versions={"cadenza": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"},
        machine={"cpu": "AMD EPYC", "cores": 2, "python": "3.11.7", "memory": "8 GB"},
        notes=("The base model ships with the package; `cadenza train demo-base` rebuilds it.",),
    )  # fmt: skip


def _write_metrics(folder: Path) -> None:
    chance = random.Random(5)
    with MetricWriter(folder, "cpt") as out:
        for n in range(30):
            perplexity = 6 + 9 * math.exp(-n / 8)
            out.write(n * 2.4, n * 20, heldout_perplexity=perplexity, train_perplexity=perplexity * 0.93)
    with MetricWriter(folder, "sft") as out:
        for n in range(120):
            loss = 0.16 + 1.4 * math.exp(-n / 14)
            rare = (
                {"heldout_loss": loss + 0.03, "val_pass1": 0.4 - 0.4 * math.exp(-n / 25)}
                if n % 10 == 0
                else {}
            )
            out.write(80 + n * 2, n * 10, train_loss=loss + chance.gauss(0, 0.03), **rare)
    with MetricWriter(folder, "rl") as out:
        for n in range(58):
            out.write(
                320 + n * 6.9, n, pass_rate=min(1, max(0, 0.36 + 0.0026 * n + chance.gauss(0, 0.06))),
                entropy=0.24 - 0.0012 * n + chance.gauss(0, 0.01), logprob_gap=0.003 + abs(chance.gauss(0, 0.0006)),
                k3=0.0002 + abs(chance.gauss(0, 0.0001)), staleness_mean=1.2 + chance.gauss(0, 0.2),
                staleness_max=chance.choice([2, 2, 3, 3, 4]), tokens_per_rollout=118 - 0.3 * n + chance.gauss(0, 5),
                context_per_rollout=330 - 0.3 * n + chance.gauss(0, 9), trainer_busy=0.82 + chance.gauss(0, 0.04),
                engine_busy=0.74 + chance.gauss(0, 0.05), env_busy=0.21 + chance.gauss(0, 0.04),
                grad_norm=0.8 + abs(chance.gauss(0, 0.2)), lr=2e-4,
            )  # fmt: skip


def _write_timeline(folder: Path) -> None:
    chance, spans = random.Random(6), []
    for n in range(58):
        t = 320 + n * 6.9
        spans.append(Span(lane="trainer", start=t + 0.9, end=t + 6.6, label=f"step {n}"))
        spans.append(Span(lane="weights", start=t + 6.65, end=t + 6.65))
        spans.append(Span(lane="engine", start=t, end=t + 3.1))
        spans.append(Span(lane="engine", start=t + 3.4, end=t + 6.2))
        for _ in range(30):
            start = t + chance.random() * 6.5
            spans.append(Span(lane="environment", start=start, end=start + chance.random() * 0.4))
    append_lines(folder / "timeline.jsonl", spans)


def _write_trajectories(folder: Path) -> None:
    prompt = "Totals in the invoice are too small when an order has more than one line. Please fix it."
    source = (
        "def total(lines):\n    amount = 0\n    for line in lines[1:]:\n"
        "        amount += line.price\n    return amount"
    )
    failing = "test_total: assert 7 == 9   total([Line(2), Line(7)]) == 9"
    before = [
        ("call", "run_tests"), ("output", failing), ("call", "read_file invoice.py"), ("output", source),
        ("call", f"replace_def invoice.py\n{source} + 1"), ("output", "ok"),
        ("final", "I fixed the total."),
    ]  # fmt: skip
    after = [
        ("call", "run_tests"), ("output", failing), ("call", "read_file invoice.py"), ("output", source),
        ("call", f"replace_def invoice.py\n{source}".replace("[1:]", "")), ("output", "ok"),
        ("call", "run_tests"),
        ("output", "ok: 4 passed"), ("final", "`total` skipped the first line of every order; all tests pass now."),
    ]  # fmt: skip
    patch = "--- a/invoice.py\n+++ b/invoice.py\n@@ -6 +6 @@\n-    for line in lines[1:]:\n+    for line in lines:\n"
    rows = []
    for policy, solved, turns, tokens in (("sft", False, before, 96), ("rl", True, after, 121)):
        told = tuple(Turn(kind=kind, text=text) for kind, text in turns)
        rows.append(
            Trajectory(
                task_id="8f1c0a77be",
                policy=policy,
                solved=solved,
                prompt=prompt,
                turns=told,
                family="off_by_one",
                ambiguity=1,
                tokens=tokens,
                patch=patch if solved else "",
            )
        )
    append_lines(folder / "trajectories.jsonl", rows)
