"""Training speed of the demo's policy on the CPU: the fused block against its definition as tensor operations.

    python benchmarks/model_cpu.py [--threads 1] [--json]

Both run in one process, turn by turn; the ratio of medians is what to compare between machines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from cadenza.core.machine import commit
from cadenza.evaluation.figures import machine
from cadenza.model.config import ModelConfig
from cadenza.model.logprobs import token_logprobs
from cadenza.model.transformer import Block, PolicyModel

SHAPES = ((6, 640), (8, 512), (16, 256))  # rows x tokens


def seconds(model: PolicyModel, ids_BT: torch.Tensor) -> float:
    """One forward and backward over every token's log-probability."""
    begun = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
        x_BTD, balance = model.hidden(ids_BT)
        x_ND = x_BTD[:, :-1].reshape(-1, x_BTD.shape[-1])
        logp_N, _ = token_logprobs(x_ND, model.embed_tokens.weight, ids_BT[:, 1:].reshape(-1))
    (-logp_N.mean() + 0.01 * balance).backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = PolicyModel(ModelConfig())
    model.initialize(0)
    fused, composed = Block.forward, Block.composed
    generator = torch.Generator().manual_seed(0)
    rows = []
    for shape in SHAPES:
        ids_BT = torch.randint(0, model.config.vocab_size, shape, generator=generator)
        times: dict[str, list[float]] = {"fused": [], "composed": []}
        for repeat in range(args.repeats + 2):
            for name, forward in (("fused", fused), ("composed", composed)):
                Block.forward = forward  # type: ignore[method-assign]
                taken = seconds(model, ids_BT)
                if repeat >= 2:  # the first rounds compile kernels
                    times[name].append(taken)
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows.append(
            {
                "shape": list(shape),
                "fused_tokens_per_s": ids_BT.numel() / medians["fused"],
                "composed_tokens_per_s": ids_BT.numel() / medians["composed"],
                "speedup": medians["composed"] / medians["fused"],
            }
        )
    result = {
        "format_version": 1, "threads": args.threads, "repeats": args.repeats, "seed": 0, "commit": commit(),
        "machine": machine(), "rows": rows,
    }  # fmt: skip
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for row in rows:
        print(
            "{} rows x {} tokens: fused {fused_tokens_per_s:,.0f} tok/s, composed {composed_tokens_per_s:,.0f} tok/s, "
            "{speedup:.2f} times as fast".format(*row["shape"], **row)
        )


if __name__ == "__main__":
    main()
