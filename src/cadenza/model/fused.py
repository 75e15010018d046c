"""A block's forward and backward on the CPU with everything between matrix products fused.

Written as tensor operations (``transformer``), a block makes dozens of passes over its activations in each direction,
a large part of a step's time on CPUs (benchmarks/model_cpu.py). Here each stretch between two products is one compiled
kernel in each direction. Attention is done in blocks of queries that read only the keys they may see.
``transformer`` holds the definition; tests hold this to it, values and gradients.

Letters as in ``transformer``; besides Z = B * K, M = T * G queries of one key-value head, X = (H + 2 K) * C.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cadenza.model import block_kernels as kernels
from cadenza.model.compiled import array

if TYPE_CHECKING:
    from cadenza.model.replay import LayerReplay
    from cadenza.model.transformer import Block

QUERY_BLOCK = 128  # positions whose queries are multiplied together with the keys up to them
EXPERT_STEP = 64  # multiple that an expert's tokens are padded to: CPU kernels are compiled per shape


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="fused")


def _share(count: int, work: Callable[[int, int, int], None], unit: int = 1) -> None:
    """Calls ``work(part, start, stop)`` for as many parts of ``range(count)`` as there are threads for products, cut
    at multiples of ``unit``."""
    units = count // unit
    parts = min(torch.get_num_threads(), units)
    if parts <= 1:
        work(0, 0, count)
        return
    cuts = [units * i // parts * unit for i in range(parts)] + [count]
    others = [_pool().submit(work, i, cuts[i], cuts[i + 1]) for i in range(1, parts)]
    work(0, 0, cuts[1])
    for other in others:
        other.result()


def _parts(*shape: int) -> np.ndarray:
    """An fp32 sum for each thread."""
    return np.zeros((torch.get_num_threads(), *shape), np.float32)


def _summed(parts: np.ndarray) -> Tensor:
    return torch.from_numpy(parts.sum(0))


class _NormShift(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight_D: Tensor, taps_DP: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        b, t, d = x_BTD.shape
        x_ND = x_BTD.detach().reshape(b * t, d)
        taps_PD = taps_DP.detach().t().contiguous()
        inverse_N = np.empty(b * t, np.float32)
        out_ND = torch.empty(b * t, d, dtype=dtype)
        xa, wa, ta, oa = x_ND.numpy(), weight_D.detach().numpy(), taps_PD.numpy(), array(out_ND)
        _share(b * t, lambda _, i, j: kernels.norm_shift(i, j, t, xa, wa, ta, eps, inverse_N, oa), t)
        ctx.save_for_backward(x_ND, weight_D, taps_PD)
        ctx.inverse_N, ctx.shape = inverse_N, (b, t, d)
        return out_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> Any:  # type: ignore[override]
        x_ND, weight_D, taps_PD = ctx.saved_tensors
        b, t, d = ctx.shape
        dx_ND = torch.empty(b * t, d)
        dweight, dtaps = _parts(d), _parts(*taps_PD.shape)
        ga, xa, wa, ta, da = (
            array(grad_ND.contiguous()),
            x_ND.numpy(),
            weight_D.detach().numpy(),
            taps_PD.numpy(),
            dx_ND.numpy(),
        )

        def work(part: int, i: int, j: int) -> None:
            kernels.norm_shift_backward(
                i, j, t, ga, xa, wa, ta, ctx.inverse_N, da, dweight[part], dtaps[part]
            )

        _share(b * t, work, t)
        return dx_ND.view(b, t, d), _summed(dweight), _summed(dtaps).t(), None, None


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_NX: Tensor, q_weight_C: Tensor, k_weight_C: Tensor, eps: float, cos_TC: Tensor, sin_TC: Tensor,
        kv_heads: int,
    ) -> Any:  # fmt: skip
        t, c = len(cos_TC), len(q_weight_C)
        n = len(qkv_NX)
        heads = qkv_NX.shape[1] // c - 2 * kv_heads
        z, groups = n // t * kv_heads, heads // kv_heads
        q_ZTGC = qkv_NX.new_empty(z, t, groups, c)
        k_ZTC, v_ZTC = qkv_NX.new_empty(z, t, c), qkv_NX.new_empty(z, t, c)
        inverse_NH = np.empty((n, heads + kv_heads), np.float32)
        norms = (q_weight_C.detach().numpy(), k_weight_C.detach().numpy())
        tables = (cos_TC.numpy(), sin_TC.numpy())
        source, out = array(qkv_NX.detach()), (array(q_ZTGC), array(k_ZTC), array(v_ZTC))
        _share(
            n, lambda _, i, j: kernels.split_heads(i, j, t, source, *norms, eps, *tables, inverse_NH, *out)
        )
        ctx.save_for_backward(qkv_NX, q_weight_C, k_weight_C, cos_TC, sin_TC)
        ctx.inverse_NH = inverse_NH
        return q_ZTGC, k_ZTC, v_ZTC

    @staticmethod
    def backward(ctx: Any, dq_ZTGC: Tensor, dk_ZTC: Tensor, dv_ZTC: Tensor) -> Any:  # type: ignore[override]
        qkv_NX, q_weight_C, k_weight_C, cos_TC, sin_TC = ctx.saved_tensors
        t, c = len(cos_TC), len(q_weight_C)
        dqkv_NX = torch.empty_like(qkv_NX)
        dq_weight, dk_weight = _parts(c), _parts(c)
        grads = (
            array(dq_ZTGC.contiguous()),
            dk_ZTC.contiguous().float().numpy(),
            dv_ZTC.contiguous().float().numpy(),
        )
        norms = (q_weight_C.detach().numpy(), k_weight_C.detach().numpy())
        tables, source, out = (cos_TC.numpy(), sin_TC.numpy()), array(qkv_NX), array(dqkv_NX)

        def work(part: int, i: int, j: int) -> None:
            kernels.split_heads_backward(
                i,
                j,
                t,
                *grads,
                source,
                *norms,
                *tables,
                ctx.inverse_NH,
                out,
                dq_weight[part],
                dk_weight[part],
            )

        _share(len(qkv_NX), work)
        return dqkv_NX, _summed(dq_weight), _summed(dk_weight), None, None, None, None


class _CausalAttention(torch.autograd.Function):
    """Queries are scaled already. Gradients of keys and values are summed over query blocks in fp32."""

    @staticmethod
    def forward(ctx: Any, q_ZTGC: Tensor, k_ZTC: Tensor, v_ZTC: Tensor) -> Tensor:
        z, t, groups, c = q_ZTGC.shape
        y_ZTGC = torch.empty_like(q_ZTGC)
        probs: list[Tensor] = []
        with torch.autocast("cpu", enabled=False):
            for first in range(0, t, QUERY_BLOCK):
                last = min(t, first + QUERY_BLOCK)
                q_ZMC = q_ZTGC[:, first:last].reshape(z, -1, c)
                scores_ZMS = torch.bmm(q_ZMC, k_ZTC[:, :last].transpose(1, 2))
                a = array(scores_ZMS)
                _share(z, lambda _, i, j, a=a, first=first: kernels.causal_softmax(i, j, first, groups, a))
                y_ZTGC[:, first:last] = torch.bmm(scores_ZMS, v_ZTC[:, :last]).view(
                    z, last - first, groups, c
                )
                probs.append(scores_ZMS)
        ctx.save_for_backward(q_ZTGC, k_ZTC, v_ZTC, *probs)
        return y_ZTGC

    @staticmethod
    def backward(ctx: Any, dy_ZTGC: Tensor) -> Any:  # type: ignore[override]
        q_ZTGC, k_ZTC, v_ZTC, *probs = ctx.saved_tensors
        z, t, groups, c = q_ZTGC.shape
        dq_ZTGC = torch.empty_like(q_ZTGC)
        dk_ZTC, dv_ZTC = torch.zeros(z, t, c), torch.zeros(z, t, c)
        for probs_ZMS, first in zip(probs, range(0, t, QUERY_BLOCK), strict=True):
            last = min(t, first + QUERY_BLOCK)
            q_ZMC = q_ZTGC[:, first:last].reshape(z, -1, c)
            dy_ZMC = dy_ZTGC[:, first:last].reshape(z, -1, c)
            dv_ZTC[:, :last] += torch.bmm(probs_ZMS.transpose(1, 2), dy_ZMC)
            dscores_ZMS = torch.bmm(dy_ZMC, v_ZTC[:, :last].transpose(1, 2))
            p, d = array(probs_ZMS), array(dscores_ZMS)
            _share(
                z,
                lambda _, i, j, p=p, d=d, first=first: kernels.causal_softmax_backward(
                    i, j, first, groups, p, d
                ),
            )
            dq_ZTGC[:, first:last] = torch.bmm(dscores_ZMS, k_ZTC[:, :last]).view(z, last - first, groups, c)
            dk_ZTC[:, :last] += torch.bmm(dscores_ZMS.transpose(1, 2), q_ZMC)
        return dq_ZTGC, dk_ZTC, dv_ZTC


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, delta_ND: Tensor, weight_D: Tensor, eps: float, gate_ED: Tensor
    ) -> Any:
        n = len(x_ND)
        sum_ND, h_ND = torch.empty_like(x_ND), torch.empty_like(delta_ND)
        logits_NE = torch.empty(n, len(gate_ED))
        inverse_N = np.empty(n, np.float32)
        xa, da, oa = (
            x_ND.detach().numpy(),
            array(delta_ND.detach()),
            (sum_ND.numpy(), array(h_ND), logits_NE.numpy()),
        )
        wa, ga = weight_D.detach().numpy(), gate_ED.detach().numpy()
        _share(n, lambda _, i, j: kernels.add_norm(i, j, xa, da, wa, eps, ga, inverse_N, *oa))
        ctx.save_for_backward(sum_ND, weight_D, gate_ED)
        ctx.inverse_N, ctx.dtype = inverse_N, delta_ND.dtype
        return sum_ND, h_ND, logits_NE

    @staticmethod
    def backward(ctx: Any, dsum_ND: Tensor, dh_ND: Tensor, dlogits_NE: Tensor) -> Any:  # type: ignore[override]
        sum_ND, weight_D, gate_ED = ctx.saved_tensors
        dx_ND, ddelta_ND = torch.empty_like(sum_ND), torch.empty_like(sum_ND, dtype=ctx.dtype)
        dweight, dgate = _parts(len(weight_D)), _parts(*gate_ED.shape)
        grads = (dsum_ND.contiguous().numpy(), array(dh_ND.contiguous()), dlogits_NE.contiguous().numpy())
        saved = (sum_ND.numpy(), weight_D.detach().numpy(), gate_ED.detach().numpy(), ctx.inverse_N)
        out = (dx_ND.numpy(), array(ddelta_ND))

        def work(part: int, i: int, j: int) -> None:
            kernels.add_norm_backward(i, j, *grads, *saved, *out, dweight[part], dgate[part])

        _share(len(sum_ND), work)
        return dx_ND, ddelta_ND, _summed(dweight), None, _summed(dgate)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_ND: Tensor, place_NJ: Tensor, rows: int) -> Tensor:
        sent_MD = h_ND.new_zeros(rows, h_ND.shape[1])  # zeros: weight gradients sum over all rows
        ha, pa, sa = array(h_ND.detach()), place_NJ.numpy(), array(sent_MD)
        _share(len(h_ND), lambda _, i, j: kernels.dispatch(i, j, ha, pa, sa))
        ctx.save_for_backward(place_NJ)
        return sent_MD

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> Any:  # type: ignore[override]
        (place_NJ,) = ctx.saved_tensors
        dh_ND = grad_MD.new_empty(len(place_NJ), grad_MD.shape[1])
        ga, pa, da = array(grad_MD.contiguous()), place_NJ.numpy(), array(dh_ND)
        _share(len(place_NJ), lambda _, i, j: kernels.dispatch_backward(i, j, ga, pa, da))
        return dh_ND, None, None


class _GroupedProduct(torch.autograd.Function):
    """Each expert's rows times its own matrix: rows ``ends_E[e - 1]`` to ``ends_E[e]`` of M belong to expert e.

    One product an expert rather than a batched one, which would pad every expert to the fullest.
    """

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_EDG: Tensor, ends_E: list[int]) -> Tensor:
        out_MG = x_MD.new_empty(len(x_MD), weight_EDG.shape[2])
        start = 0
        for weight_DG, end in zip(weight_EDG, ends_E, strict=True):
            torch.mm(x_MD[start:end], weight_DG, out=out_MG[start:end])
            start = end
        ctx.save_for_backward(x_MD, weight_EDG)
        ctx.ends_E = ends_E
        return out_MG

    @staticmethod
    def backward(ctx: Any, grad_MG: Tensor) -> Any:  # type: ignore[override]
        x_MD, weight_EDG = ctx.saved_tensors
        grad_MG = grad_MG.contiguous()
        dx_MD, dweight_EDG = torch.empty_like(x_MD), torch.zeros_like(weight_EDG)
        start = 0
        for weight_DG, dweight_DG, end in zip(weight_EDG, dweight_EDG, ctx.ends_E, strict=True):
            if end > start:
                torch.mm(grad_MG[start:end], weight_DG.t(), out=dx_MD[start:end])
                torch.mm(x_MD[start:end].t(), grad_MG[start:end], out=dweight_DG)
            start = end
        return dx_MD, dweight_EDG, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_MG: Tensor) -> Tensor:
        out_MF = h_MG.new_empty(len(h_MG), h_MG.shape[1] // 2)
        ha, oa = array(h_MG.detach()), array(out_MF)
        _share(len(h_MG), lambda _, i, j: kernels.swiglu(i, j, ha, oa))
        ctx.save_for_backward(h_MG)
        return out_MF

    @staticmethod
    def backward(ctx: Any, grad_MF: Tensor) -> Any:  # type: ignore[override]
        (h_MG,) = ctx.saved_tensors
        dh_MG = torch.empty_like(h_MG)
        ga, ha, da = array(grad_MF.contiguous()), array(h_MG), array(dh_MG)
        _share(len(h_MG), lambda _, i, j: kernels.swiglu_backward(i, j, ga, ha, da))
        return dh_MG


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, y_MD: Tensor, place_NJ: Tensor, weights_NJ: Tensor, shared_ND: Tensor
    ) -> Tensor:
        out_ND = torch.empty_like(x_ND)
        xa, ya, sa, oa = (
            x_ND.detach().numpy(),
            array(y_MD.detach()),
            array(shared_ND.detach()),
            out_ND.numpy(),
        )
        pa, wa = place_NJ.numpy(), weights_NJ.detach().numpy()
        _share(len(x_ND), lambda _, i, j: kernels.combine(i, j, xa, ya, pa, wa, sa, oa))
        ctx.save_for_backward(y_MD, place_NJ, weights_NJ, shared_ND)
        return out_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> Any:  # type: ignore[override]
        y_MD, place_NJ, weights_NJ, shared_ND = ctx.saved_tensors
        dy_MD = torch.zeros_like(y_MD)
        dweights_NJ, dshared_ND = torch.empty_like(weights_NJ), torch.empty_like(shared_ND)
        grad_ND = grad_ND.contiguous()
        ga, ya, pa, wa = grad_ND.numpy(), array(y_MD), place_NJ.numpy(), weights_NJ.detach().numpy()
        out = (array(dy_MD), dweights_NJ.numpy(), array(dshared_ND))
        _share(len(grad_ND), lambda _, i, j: kernels.combine_backward(i, j, ga, ya, pa, wa, *out))
        return grad_ND, dy_MD, None, dweights_NJ, dshared_ND


def block_forward(
    block: Block, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor, replay: LayerReplay | None = None
) -> tuple[Tensor, Tensor]:
    """What ``Block.forward`` computes: (x_BTD, balance). ``x_BTD`` is fp32 and on the CPU."""
    b, t, d = x_BTD.shape
    if len(cos_TC) != t:
        raise ValueError(
            f"rotary tables of {len(cos_TC)} positions for rows of {t}"
        )  # kernels check no bounds
    attention, moe = block.self_attn, block.mlp
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_BTD.dtype
    norm = block.input_layernorm
    taps_DP = block.short_conv.weight_DP if block.short_conv is not None else x_BTD.new_zeros(d, 0)
    h_ND: Tensor = _NormShift.apply(x_BTD, norm.weight, taps_DP, norm.eps, dtype)  # type: ignore[assignment]
    with torch.autocast("cpu", enabled=False):
        weights = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        qkv_NX = F.linear(h_ND, torch.cat(weights).to(dtype))
        q, k, v = _SplitHeads.apply(  # type: ignore[misc]
            qkv_NX, attention.q_norm.weight, attention.k_norm.weight, norm.eps, cos_TC, sin_TC, attention.kv
        )
        y_ZTGC: Tensor = _CausalAttention.apply(q, k, v)  # type: ignore[assignment]
        y_ND = y_ZTGC.view(b, attention.kv, t, -1).transpose(1, 2).reshape(b * t, -1)
        delta_ND = F.linear(y_ND, attention.o_proj.weight.to(dtype))
        post = block.post_attention_layernorm
        x_ND, h_ND, logits_NE = _AddNorm.apply(  # type: ignore[misc]
            x_BTD.reshape(b * t, d), delta_ND, post.weight, post.eps, moe.gate.weight
        )
        probs_NE, weights_NJ, experts_NJ = moe.choose(logits_NE, replay)
        place_NJ = torch.empty_like(experts_NJ)
        load_E = np.zeros(moe.n_experts, np.int64)
        kernels.places(experts_NJ.numpy(), place_NJ.numpy(), load_E)
        ends_E = torch.from_numpy(-(-load_E // EXPERT_STEP) * EXPERT_STEP).cumsum(0)
        place_NJ += (ends_E - torch.from_numpy(load_E)).gather(0, experts_NJ.view(-1)).view_as(place_NJ)
        ends = ends_E.tolist()
        sent_MD: Tensor = _Dispatch.apply(h_ND, place_NJ, ends[-1])  # type: ignore[assignment]
        wide_MG = _GroupedProduct.apply(sent_MD, moe.w_in_EGD.to(dtype).transpose(1, 2), ends)
        y_MD = _GroupedProduct.apply(_SwiGLU.apply(wide_MG), moe.w_out_EFD.to(dtype), ends)
        shared_ND = h_ND.new_zeros(0, d)
        if moe.d_shared:
            wide_NG = F.linear(h_ND, moe.shared_in.weight.to(dtype))
            shared_ND = F.linear(_SwiGLU.apply(wide_NG), moe.shared_out.weight.to(dtype))  # type: ignore[arg-type]
        x_ND = _Combine.apply(x_ND, y_MD, place_NJ, weights_NJ, shared_ND)
        balance = moe.balance(probs_NE, torch.from_numpy(load_E) / experts_NJ.numel())
    return x_ND.view(b, t, d), balance
