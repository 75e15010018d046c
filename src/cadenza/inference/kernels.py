"""What the engine computes beside matrix products, compiled for the CPU it runs on (numba).

A step's new tokens of all rows lie one after the other, N of them, without padding: row r has ``count_r[r]`` of them
from index ``first_r[r]``, continues the ``length_r[r]`` positions cached in slot ``slot_r[r]``. Residuals and norms
are fp32; what enters and leaves a matrix product has the working dtype: float32, or bfloat16 seen as uint16.

Letters: N tokens, B rows, R slots, D model width, H query heads, K key-value heads, C head width, S positions,
G blocks of KEYS positions (in a block of keys neighbours in memory are neighbours in position, so that their scores
fill a vector register), P = short-convolution taps - 1, E experts, J experts per token, F hidden width, M places of
dispatched tokens, or queries of one row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cadenza.model.compiled import compiled, inverse_rms, narrow, normed_head, softmax, widen

KEYS = 64  # cached positions of a block: its keys and values stay in the first-level cache
QUERIES = 64  # queries whose scores are kept at once


@compiled
def embed(ids_N: Any, table_VD: Any, x_ND: Any) -> None:
    """x = the rows of the embedding, in fp32."""
    for n in range(ids_N.shape[0]):
        for d in range(table_VD.shape[1]):
            x_ND[n, d] = widen(table_VD[ids_N[n], d])


@compiled
def norm(x_ND: Any, index_B: Any, weight_D: Any, eps: float, out_BD: Any) -> None:
    """out = RMSNorm of the chosen tokens."""
    for b in range(index_B.shape[0]):
        row = x_ND[index_B[b]]
        scale = inverse_rms(row, eps)
        for d in range(row.shape[0]):
            out_BD[b, d] = narrow(out_BD, row[d] * scale * weight_D[d])


@compiled
def norm_and_shift(
    x_ND: Any,
    weight_D: Any,
    eps: float,
    taps_PD: Any,
    tail_RPD: Any,
    slot_B: Any,
    first_B: Any,
    count_B: Any,
    normed_ND: Any,
    out_ND: Any,
) -> None:
    """RMSNorm, then the causal short convolution: each token adds the weighted P tokens before it.

    The tokens before a row's first one are its slot's tail, which is moved on. ``normed_ND`` is scratch.
    """
    past, width = taps_PD.shape
    for b in range(slot_B.shape[0]):
        first, count, tail_PD = first_B[b], count_B[b], tail_RPD[slot_B[b]]
        for n in range(first, first + count):
            scale = inverse_rms(x_ND[n], eps)
            for d in range(width):
                normed_ND[n, d] = x_ND[n, d] * scale * weight_D[d]
        for t in range(count):
            mixed = x_ND[first + t].copy()
            mixed[:] = normed_ND[first + t]
            for i in range(past):
                at = t - 1 - i
                before = normed_ND[first + at] if at >= 0 else tail_PD[past + at]
                for d in range(width):
                    mixed[d] += before[d] * taps_PD[i, d]
            for d in range(width):
                out_ND[first + t, d] = narrow(out_ND, mixed[d])
        for j in range(past):  # in this order no tail row is overwritten before it is read
            at = count + j - past
            tail_PD[j] = normed_ND[first + at] if at >= 0 else tail_PD[count + j]


@compiled
def place_heads(
    qkv_NX: Any,
    q_weight_C: Any,
    k_weight_C: Any,
    eps: float,
    cos_SC: Any,
    sin_SC: Any,
    slot_B: Any,
    first_B: Any,
    count_B: Any,
    length_B: Any,
    k_RKGCS: Any,
    v_RKSC: Any,
    q_NHC: Any,
) -> None:
    """Normalizes and rotates queries and keys; keys and values go into the cache, scaled queries to ``q_NHC``."""
    heads, width = q_NHC.shape[1:]
    kv_heads = k_RKGCS.shape[1]
    scale = np.float32(1.0 / np.sqrt(np.float32(width)))
    key = np.empty(width, np.float32)
    for b in range(slot_B.shape[0]):
        for t in range(count_B[b]):
            n, position = first_B[b] + t, length_B[b] + t
            cos, sin = cos_SC[position], sin_SC[position]
            for h in range(heads):
                source = qkv_NX[n, h * width : (h + 1) * width]
                normed_head(source, q_weight_C, eps, cos, sin, scale, qkv_NX, q_NHC[n, h])
            for k in range(kv_heads):
                at = (heads + k) * width
                source = qkv_NX[n, at : at + width]
                normed_head(source, k_weight_C, eps, cos, sin, np.float32(1.0), qkv_NX, key)
                value_at = (heads + kv_heads + k) * width
                for c in range(width):
                    k_RKGCS[slot_B[b], k, position // KEYS, c, position % KEYS] = narrow(k_RKGCS, key[c])
                    v_RKSC[slot_B[b], k, position, c] = qkv_NX[n, value_at + c]


@njit(inline="always")
def _score(q_C: Any, r_C: Any, keys_CS: Any, out_q_S: Any, out_r_S: Any) -> None:
    """Scores of two queries over one block of keys. Four widths at once: fewer passes over the sums."""
    out_q_S[:] = np.float32(0.0)
    out_r_S[:] = np.float32(0.0)
    for c in range(0, q_C.shape[0] - 3, 4):
        q0, q1, q2, q3 = q_C[c], q_C[c + 1], q_C[c + 2], q_C[c + 3]
        r0, r1, r2, r3 = r_C[c], r_C[c + 1], r_C[c + 2], r_C[c + 3]
        for s in range(KEYS):
            k0, k1 = widen(keys_CS[c, s]), widen(keys_CS[c + 1, s])
            k2, k3 = widen(keys_CS[c + 2, s]), widen(keys_CS[c + 3, s])
            out_q_S[s] += q0 * k0 + q1 * k1 + q2 * k2 + q3 * k3
            out_r_S[s] += r0 * k0 + r1 * k1 + r2 * k2 + r3 * k3
    for c in range(q_C.shape[0] // 4 * 4, q_C.shape[0]):
        for s in range(KEYS):
            out_q_S[s] += q_C[c] * widen(keys_CS[c, s])
            out_r_S[s] += r_C[c] * widen(keys_CS[c, s])


@njit(inline="always")
def _gather(q_S: Any, r_S: Any, values_SC: Any, last: Any, sum_q_C: Any, sum_r_C: Any) -> None:
    """Adds the first ``last`` values, weighted for two queries."""
    for s in range(0, last - 3, 4):
        q0, q1, q2, q3 = q_S[s], q_S[s + 1], q_S[s + 2], q_S[s + 3]
        r0, r1, r2, r3 = r_S[s], r_S[s + 1], r_S[s + 2], r_S[s + 3]
        for c in range(values_SC.shape[1]):
            v0, v1 = widen(values_SC[s, c]), widen(values_SC[s + 1, c])
            v2, v3 = widen(values_SC[s + 2, c]), widen(values_SC[s + 3, c])
            sum_q_C[c] += q0 * v0 + q1 * v1 + q2 * v2 + q3 * v3
            sum_r_C[c] += r0 * v0 + r1 * v1 + r2 * v2 + r3 * v3
    for s in range(last // 4 * 4, last):
        for c in range(values_SC.shape[1]):
            sum_q_C[c] += q_S[s] * widen(values_SC[s, c])
            sum_r_C[c] += r_S[s] * widen(values_SC[s, c])


@compiled
def _attend_row(
    q_NHC: Any,
    keys_GCS: Any,
    values_SC: Any,
    first_head: int,
    group: int,
    length: int,
    scores_MS: Any,
    out_NX: Any,
) -> None:
    """The new tokens of one row, the heads of one key-value head. Token t sees ``length + t + 1`` positions.

    Queries go in pairs, so that a key or value once loaded is used twice. ``scores_MS`` is scratch.
    """
    count, width = q_NHC.shape[0], q_NHC.shape[2]
    sums_MC = np.empty((max(QUERIES, group), width), np.float32)
    nobody_S, nobody_C = np.empty(KEYS, np.float32), np.empty(width, np.float32)
    tokens = max(1, QUERIES // group)
    for t0 in range(0, count, tokens):
        t1 = min(count, t0 + tokens)
        pairs = ((t1 - t0) * group + 1) // 2
        last = (t1 - t0) * group - 1  # the partner of an odd query is itself, and its second answer nobody's
        blocks = (length + t1 + KEYS - 1) // KEYS
        for block in range(blocks):
            keys_CS, s0 = keys_GCS[block], block * KEYS
            for pair in range(pairs):
                m, other = 2 * pair, min(2 * pair + 1, last)
                if length + t0 + other // group < s0:
                    continue
                _score(
                    q_NHC[t0 + m // group, first_head + m % group],
                    q_NHC[t0 + other // group, first_head + other % group],
                    keys_CS,
                    scores_MS[m, s0 : s0 + KEYS],
                    scores_MS[other, s0 : s0 + KEYS] if other != m else nobody_S,
                )
        sums_MC[:] = np.float32(0.0)
        for m in range(last + 1):
            seen = length + t0 + m // group + 1
            scale = softmax(scores_MS[m], seen)
            for s in range(seen):
                scores_MS[m, s] *= scale
            scores_MS[m, seen : blocks * KEYS] = np.float32(0.0)
        for block in range(blocks):
            s0 = block * KEYS
            size = min(KEYS, length + t1 - s0)
            for pair in range(pairs):
                m, other = 2 * pair, min(2 * pair + 1, last)
                seen = min(size, length + t0 + other // group + 1 - s0)
                if seen <= 0:
                    continue
                q_S, r_S = scores_MS[m, s0 : s0 + KEYS], scores_MS[other, s0 : s0 + KEYS]
                sums = sums_MC[other] if other != m else nobody_C
                _gather(q_S, r_S, values_SC[s0:], seen, sums_MC[m], sums)
        for m in range(last + 1):
            at = (first_head + m % group) * width
            for c in range(width):
                out_NX[t0 + m // group, at + c] = narrow(out_NX, sums_MC[m, c])


@compiled
def attend(
    q_NHC: Any,
    k_RKGCS: Any,
    v_RKSC: Any,
    slot_B: Any,
    first_B: Any,
    count_B: Any,
    length_B: Any,
    scores_MS: Any,
    out_NX: Any,
) -> None:
    """Causal grouped-query attention of every new token over its row's cache; ``scores_MS`` is scratch."""
    kv_heads = k_RKGCS.shape[1]
    group = q_NHC.shape[1] // kv_heads
    for b in range(slot_B.shape[0]):
        rows, slot = slice(first_B[b], first_B[b] + count_B[b]), slot_B[b]
        for k in range(kv_heads):
            _attend_row(
                q_NHC[rows],
                k_RKGCS[slot, k],
                v_RKSC[slot, k],
                k * group,
                group,
                length_B[b],
                scores_MS,
                out_NX[rows],
            )


@compiled
def add_norm_route(
    x_ND: Any,
    delta_ND: Any,
    weight_D: Any,
    eps: float,
    gate_ED: Any,
    h_ND: Any,
    weights_NJ: Any,
    experts_NJ: Any,
    load_E: Any,
) -> None:
    """x += delta; h = RMSNorm(x); the J experts of each token and their normalized weights; tokens per expert."""
    n_experts, width = gate_ED.shape
    probs = np.empty(n_experts, np.float32)
    normed = np.empty(width, np.float32)
    load_E[:] = 0
    for n in range(x_ND.shape[0]):
        for d in range(width):
            x_ND[n, d] += widen(delta_ND[n, d])
        scale = inverse_rms(x_ND[n], eps)
        for d in range(width):
            normed[d] = x_ND[n, d] * scale * weight_D[d]
            h_ND[n, d] = narrow(h_ND, normed[d])
        for e in range(n_experts):
            total = np.float32(0.0)
            for d in range(width):
                total += normed[d] * gate_ED[e, d]
            probs[e] = total
        softmax(probs, n_experts)
        chosen = np.float32(0.0)
        for j in range(weights_NJ.shape[1]):
            best = 0
            for e in range(1, n_experts):
                if probs[e] > probs[best]:
                    best = e
            weights_NJ[n, j] = probs[best]
            experts_NJ[n, j] = best
            chosen += probs[best]
            probs[best] = np.float32(-1.0)
            load_E[best] += 1
        for j in range(weights_NJ.shape[1]):
            weights_NJ[n, j] /= chosen


@compiled
def dispatch(h_ND: Any, experts_NJ: Any, capacity: int, place_NJ: Any, out_MD: Any) -> None:
    """Copies every token to a place of each of its experts; expert e has places e * capacity and on."""
    filled = np.zeros(out_MD.shape[0] // capacity, np.int64)
    for n in range(h_ND.shape[0]):
        for j in range(experts_NJ.shape[1]):
            expert = experts_NJ[n, j]
            place = expert * capacity + filled[expert]
            filled[expert] += 1
            place_NJ[n, j] = place
            out_MD[place] = h_ND[n]
