"""Forward and backward of what lies between a block's matrix products, compiled for the CPU (see ``fused``).

Every kernel works on tokens ``start`` to ``stop`` of N, so that threads can share them; sums over tokens (weight
gradients) go to arrays of the caller's part. Gradients treat rounding to the working dtype as the identity.

Letters: N = B * T tokens, D model width, P = short-convolution taps - 1, H query heads, K key-value heads,
C head width, G = H / K, Z = B * K, E experts, J experts per token, F hidden width, M places of dispatched tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cadenza.model.compiled import compiled, exp, inverse_rms, logistic, narrow, normed_head, widen


@compiled
def norm_shift(
    start: int,
    stop: int,
    t_length: int,
    x_ND: Any,
    weight_D: Any,
    taps_PD: Any,
    eps: float,
    inverse_N: Any,
    out_ND: Any,
) -> None:
    """RMSNorm, then each token adds the weighted P tokens before it in its row. Starts at a row's start."""
    past, width = taps_PD.shape
    mixed = np.empty(width, np.float32)
    for n in range(start, stop):
        inverse_N[n] = inverse_rms(x_ND[n], eps)
        scale = inverse_N[n]
        for d in range(width):
            mixed[d] = x_ND[n, d] * scale
        for i in range(min(past, n % t_length)):
            m = n - 1 - i
            scale = inverse_N[m]
            for d in range(width):
                mixed[d] += x_ND[m, d] * scale * taps_PD[i, d]
        for d in range(width):
            out_ND[n, d] = narrow(out_ND, mixed[d] * weight_D[d])


@compiled
def norm_shift_backward(
    start: int,
    stop: int,
    t_length: int,
    grad_ND: Any,
    x_ND: Any,
    weight_D: Any,
    taps_PD: Any,
    inverse_N: Any,
    dx_ND: Any,
    dweight_D: Any,
    dtaps_PD: Any,
) -> None:
    """``dx_ND`` gets the gradient; ``dweight_D`` and ``dtaps_PD`` are added to."""
    past, width = taps_PD.shape
    grad = np.empty(width, np.float32)
    for n in range(start, stop):
        for d in range(width):
            grad[d] = widen(grad_ND[n, d])
        for i in range(min(past, n % t_length)):
            m = n - 1 - i
            scale = inverse_N[m]
            for d in range(width):
                dtaps_PD[i, d] += grad[d] * x_ND[m, d] * scale * weight_D[d]
        for i in range(min(past, t_length - 1 - n % t_length)):
            for d in range(width):
                grad[d] += widen(grad_ND[n + 1 + i, d]) * taps_PD[i, d]
        scale = inverse_N[n]
        total = np.float32(0.0)
        for d in range(width):
            normed = x_ND[n, d] * scale
            dweight_D[d] += grad[d] * normed
            grad[d] *= weight_D[d]
            total += grad[d] * normed
        total /= np.float32(width)
        for d in range(width):
            dx_ND[n, d] = scale * (grad[d] - x_ND[n, d] * scale * total)


@compiled
def split_heads(
    start: int,
    stop: int,
    t_length: int,
    qkv_NX: Any,
    q_weight_C: Any,
    k_weight_C: Any,
    eps: float,
    cos_TC: Any,
    sin_TC: Any,
    inverse_NH: Any,
    q_ZTGC: Any,
    k_ZTC: Any,
    v_ZTC: Any,
) -> None:
    """QK norm, rotation, the query's scale, and the layout attention wants; ``inverse_NH`` keeps 1 / rms per head."""
    groups, width = q_ZTGC.shape[2:]
    kv_heads = k_ZTC.shape[0] // (qkv_NX.shape[0] // t_length)
    heads = groups * kv_heads
    scale_q = np.float32(1.0 / np.sqrt(np.float32(width)))
    head = np.empty(width, np.float32)
    for n in range(start, stop):
        b, t = n // t_length, n % t_length
        for h in range(heads + kv_heads):
            is_query = h < heads
            z = b * kv_heads + (h // groups if is_query else h - heads)
            weight_C = q_weight_C if is_query else k_weight_C
            out = q_ZTGC[z, t, h % groups] if is_query else k_ZTC[z, t]
            source = qkv_NX[n, h * width : (h + 1) * width]
            scale = scale_q if is_query else np.float32(1.0)
            inverse_NH[n, h] = normed_head(source, weight_C, eps, cos_TC[t], sin_TC[t], scale, qkv_NX, head)
            for c in range(width):
                out[c] = narrow(q_ZTGC, head[c])
        for k in range(kv_heads):
            at = (heads + kv_heads + k) * width
            v_ZTC[b * kv_heads + k, t] = qkv_NX[n, at : at + width]


@compiled
def split_heads_backward(
    start: int,
    stop: int,
    t_length: int,
    dq_ZTGC: Any,
    dk_ZTC: Any,
    dv_ZTC: Any,
    qkv_NX: Any,
    q_weight_C: Any,
    k_weight_C: Any,
    cos_TC: Any,
    sin_TC: Any,
    inverse_NH: Any,
    dqkv_NX: Any,
    dq_weight_C: Any,
    dk_weight_C: Any,
) -> None:
    """``dqkv_NX`` gets the gradient; the norms' weight gradients are added to. dk and dv are fp32."""
    groups, width = dq_ZTGC.shape[2:]
    half = width // 2
    kv_heads = dk_ZTC.shape[0] // (qkv_NX.shape[0] // t_length)
    heads = groups * kv_heads
    scale_q = np.float32(1.0 / np.sqrt(np.float32(width)))
    grad = np.empty(width, np.float32)
    normed = np.empty(width, np.float32)
    for n in range(start, stop):
        b, t = n // t_length, n % t_length
        for h in range(heads + kv_heads):
            is_query = h < heads
            z = b * kv_heads + (h // groups if is_query else h - heads)
            if is_query:
                source = dq_ZTGC[z, t, h % groups]
                for c in range(width):
                    grad[c] = widen(source[c]) * scale_q
            else:
                for c in range(width):
                    grad[c] = dk_ZTC[z, t, c]
            for c in range(half):
                first = grad[c] * cos_TC[t, c] + grad[c + half] * sin_TC[t, c]
                grad[c + half] = grad[c + half] * cos_TC[t, c] - grad[c] * sin_TC[t, c]
                grad[c] = first
            weight_C = q_weight_C if is_query else k_weight_C
            dweight_C = dq_weight_C if is_query else dk_weight_C
            inverse = inverse_NH[n, h]
            total = np.float32(0.0)
            for c in range(width):
                normed[c] = widen(qkv_NX[n, h * width + c]) * inverse
                dweight_C[c] += grad[c] * normed[c]
                grad[c] *= weight_C[c]
                total += grad[c] * normed[c]
            total /= np.float32(width)
            for c in range(width):
                dqkv_NX[n, h * width + c] = narrow(dqkv_NX, inverse * (grad[c] - normed[c] * total))
        for k in range(kv_heads):
            at = (heads + kv_heads + k) * width
            for c in range(width):
                dqkv_NX[n, at + c] = narrow(dqkv_NX, dv_ZTC[b * kv_heads + k, t, c])


@compiled
def causal_softmax(start: int, stop: int, first: int, groups: int, scores_ZMS: Any) -> None:
    """Softmax in place for heads ``start`` to ``stop``. Query m is at position first + m // groups and sees the
    positions up to its own; the others get 0."""
    length = scores_ZMS.shape[2]
    row = np.empty(length, np.float32)
    for z in range(start, stop):
        for m in range(scores_ZMS.shape[1]):
            seen = first + m // groups + 1
            scores = scores_ZMS[z, m]
            top = np.float32(-3.0e38)
            for s in range(seen):
                row[s] = widen(scores[s])
                top = max(top, row[s])
            total = np.float32(0.0)
            for s in range(seen):
                row[s] = exp(row[s] - top)
                total += row[s]
            scale = np.float32(1.0) / total
            for s in range(seen):
                scores[s] = narrow(scores_ZMS, row[s] * scale)
            for s in range(seen, length):
                scores[s] = narrow(scores_ZMS, np.float32(0.0))


@compiled
def causal_softmax_backward(
    start: int, stop: int, first: int, groups: int, probs_ZMS: Any, grad_ZMS: Any
) -> None:
    """Turns the gradient of the probabilities into that of the scores, in place."""
    length = probs_ZMS.shape[2]
    for z in range(start, stop):
        for m in range(probs_ZMS.shape[1]):
            seen = first + m // groups + 1
            probs, grad = probs_ZMS[z, m], grad_ZMS[z, m]
            total = np.float32(0.0)
            for s in range(seen):
                total += widen(probs[s]) * widen(grad[s])
            for s in range(seen):
                grad[s] = narrow(grad_ZMS, widen(probs[s]) * (widen(grad[s]) - total))
            for s in range(seen, length):
                grad[s] = narrow(grad_ZMS, np.float32(0.0))


@compiled
def add_norm(
    start: int, stop: int, x_ND: Any, delta_ND: Any, weight_D: Any, eps: float, gate_ED: Any, inverse_N: Any,
    sum_ND: Any, h_ND: Any, logits_NE: Any,
) -> None:  # fmt: skip
    """sum = x + delta; h = RMSNorm(sum) in the working dtype; the router's logits from the fp32 norm."""
    width = x_ND.shape[1]
    normed = np.empty(width, np.float32)
    for n in range(start, stop):
        for d in range(width):
            sum_ND[n, d] = x_ND[n, d] + widen(delta_ND[n, d])
        scale = inverse_rms(sum_ND[n], eps)
        inverse_N[n] = scale
        for d in range(width):
            normed[d] = sum_ND[n, d] * scale * weight_D[d]
            h_ND[n, d] = narrow(h_ND, normed[d])
        for e in range(gate_ED.shape[0]):
            total = np.float32(0.0)
            for d in range(width):
                total += normed[d] * gate_ED[e, d]
            logits_NE[n, e] = total


@compiled
def add_norm_backward(
    start: int, stop: int, grad_ND: Any, dh_ND: Any, dlogits_NE: Any, sum_ND: Any, weight_D: Any, gate_ED: Any,
    inverse_N: Any, dx_ND: Any, ddelta_ND: Any, dweight_D: Any, dgate_ED: Any,
) -> None:  # fmt: skip
    """``grad_ND`` is the gradient of the sum (fp32); dx and ddelta get the whole, weights' gradients are added to."""
    width = sum_ND.shape[1]
    grad = np.empty(width, np.float32)
    normed = np.empty(width, np.float32)
    for n in range(start, stop):
        scale = inverse_N[n]
        for d in range(width):
            grad[d] = widen(dh_ND[n, d])
            normed[d] = sum_ND[n, d] * scale
        for e in range(gate_ED.shape[0]):
            dlogit = dlogits_NE[n, e]
            for d in range(width):
                grad[d] += dlogit * gate_ED[e, d]
                dgate_ED[e, d] += dlogit * normed[d] * weight_D[d]
        total = np.float32(0.0)
        for d in range(width):
            dweight_D[d] += grad[d] * normed[d]
            grad[d] *= weight_D[d]
            total += grad[d] * normed[d]
        total /= np.float32(width)
        for d in range(width):
            value = grad_ND[n, d] + scale * (grad[d] - normed[d] * total)
            dx_ND[n, d] = value
            ddelta_ND[n, d] = narrow(ddelta_ND, value)


@compiled
def places(experts_NJ: Any, place_NJ: Any, load_E: Any) -> None:
    """Numbers each expert's tokens in order: ``place_NJ`` within the expert, ``load_E`` how many it has."""
    load_E[:] = 0
    for n in range(experts_NJ.shape[0]):
        for j in range(experts_NJ.shape[1]):
            place_NJ[n, j] = load_E[experts_NJ[n, j]]
            load_E[experts_NJ[n, j]] += 1


@compiled
def dispatch(start: int, stop: int, h_ND: Any, place_NJ: Any, out_MD: Any) -> None:
    """Copies each token to its places."""
    for n in range(start, stop):
        for j in range(place_NJ.shape[1]):
            out_MD[place_NJ[n, j]] = h_ND[n]


@compiled
def dispatch_backward(start: int, stop: int, grad_MD: Any, place_NJ: Any, dh_ND: Any) -> None:
    """Sums the gradients of each token's places."""
    total = np.empty(dh_ND.shape[1], np.float32)
    for n in range(start, stop):
        total[:] = np.float32(0.0)
        for j in range(place_NJ.shape[1]):
            grad = grad_MD[place_NJ[n, j]]
            for d in range(len(total)):
                total[d] += widen(grad[d])
        for d in range(len(total)):
            dh_ND[n, d] = narrow(dh_ND, total[d])


@compiled
def swiglu(start: int, stop: int, h_MG: Any, out_MF: Any) -> None:
    """silu(gate) * up; the first half of a row are gates."""
    width = out_MF.shape[1]
    for m in range(start, stop):
        for f in range(width):
            gate = widen(h_MG[m, f])
            share = logistic(gate)
            out_MF[m, f] = narrow(out_MF, gate * share * widen(h_MG[m, f + width]))


@compiled
def swiglu_backward(start: int, stop: int, grad_MF: Any, h_MG: Any, dh_MG: Any) -> None:
    """Gradient of ``swiglu``."""
    width = grad_MF.shape[1]
    for m in range(start, stop):
        for f in range(width):
            gate, up, grad = widen(h_MG[m, f]), widen(h_MG[m, f + width]), widen(grad_MF[m, f])
            share = logistic(gate)
            dh_MG[m, f] = narrow(
                dh_MG, grad * up * share * (np.float32(1.0) + gate * (np.float32(1.0) - share))
            )
            dh_MG[m, f + width] = narrow(dh_MG, grad * gate * share)


@compiled
def combine(
    start: int, stop: int, x_ND: Any, y_MD: Any, place_NJ: Any, weights_NJ: Any, shared_ND: Any, out_ND: Any
) -> None:
    """out = x + the weighted answers of each token's experts + the shared expert's (no rows: none)."""
    width = x_ND.shape[1]
    for n in range(start, stop):
        for d in range(width):
            out_ND[n, d] = x_ND[n, d]
        for j in range(place_NJ.shape[1]):
            weight, place = weights_NJ[n, j], place_NJ[n, j]
            for d in range(width):
                out_ND[n, d] += weight * widen(y_MD[place, d])
        if shared_ND.shape[0]:
            for d in range(width):
                out_ND[n, d] += widen(shared_ND[n, d])


@compiled
def combine_backward(
    start: int, stop: int, grad_ND: Any, y_MD: Any, place_NJ: Any, weights_NJ: Any, dy_MD: Any, dweights_NJ: Any,
    dshared_ND: Any,
) -> None:  # fmt: skip
    """Gradients of the answers, their weights and the shared answer; that of x is ``grad_ND`` itself."""
    width = grad_ND.shape[1]
    for n in range(start, stop):
        for j in range(place_NJ.shape[1]):
            weight, place = weights_NJ[n, j], place_NJ[n, j]
            total = np.float32(0.0)
            for d in range(width):
                total += grad_ND[n, d] * widen(y_MD[place, d])
                dy_MD[place, d] = narrow(dy_MD, weight * grad_ND[n, d])
            dweights_NJ[n, j] = total
        if dshared_ND.shape[0]:
            for d in range(width):
                dshared_ND[n, d] = narrow(dshared_ND, grad_ND[n, d])
